"""The summary's parts that scores and answers give: `quality`, `contrasts`, `questions_without_saving`, `screen`."""

from collections.abc import Sequence
from pathlib import Path

import msgspec

from hyco_export.errors import HycoError
from hyco_export.evaluate.quality.contrasts import (
    ScoredAnswers,
    contrasts,
    is_judged,
    qualities,
    questions_without_saving,
    screen,
)
from hyco_export.evaluate.quality.evaluation_folder import (
    Answer,
    Contrast,
    NoSaving,
    Quality,
    Score,
    Screened,
    read_answers,
    read_scores,
    systems_of,
    update_summary,
)
from hyco_export.evaluate.quality.reference_metrics import SCORED, quality


class QualitySummary(msgspec.Struct, frozen=True):
    """Every system against the baselines. Questions without saving, by system, and the screen are against the first
    one; `notes` say what could not be compared."""

    systems: tuple[str, ...]
    baselines: tuple[str, ...]
    quality: tuple[Quality, ...]
    contrasts: tuple[Contrast, ...]
    questions_without_saving: dict[str, tuple[NoSaving, ...]]
    screen: tuple[Screened, ...]
    notes: tuple[str, ...]


def summarise(folders: Sequence[Path], baselines: Sequence[str] = ()) -> QualitySummary:
    """Work it out from the folders' answers and scores.

    Several folders are put together: a system that more than one of them has is `FOLDER:SYSTEM`.

    Args:
        baselines: none for the first system.

    Raises:
        ArtifactError: a folder without answers, or damaged.
        HycoError: a baseline that is none of the systems, or folders of one name.
    """
    systems, answers, scores = _put_together(folders)
    for name in baselines:
        if name not in systems:
            raise HycoError(f"{name!r} is none of the systems here", f"give one of {', '.join(systems)}")
    chosen = tuple(dict.fromkeys(baselines or systems[:1]))
    scored = ScoredAnswers(answers, scores)
    found = [one for name in chosen for one in contrasts(scored, systems, name)]
    by_references = [score for score in scores if score.metric in SCORED and score.question in scored.tasks]
    measured = quality(by_references, scored.tasks)
    return QualitySummary(
        systems=tuple(systems),
        baselines=chosen,
        quality=(*sorted(measured, key=lambda row: systems.index(row.system)), *qualities(scored, systems)),
        contrasts=tuple(found),
        questions_without_saving=questions_without_saving(scored, systems, chosen[0]),
        screen=tuple(screen(scored, systems, chosen[0])),
        notes=(*_notes(systems, chosen, found, answers), *_left_out(scored, found)),
    )


def write_quality(folder: Path, found: QualitySummary) -> None:
    """Put it into `summary.json`, whose other parts stay as they are."""
    names = ("quality", "contrasts", "questions_without_saving", "screen")
    update_summary(folder, {name: getattr(found, name) for name in names})


def _put_together(folders: Sequence[Path]) -> tuple[list[str], list[Answer], list[Score]]:
    read = [(folder, read_answers(folder), read_scores(folder)) for folder in folders]
    named = [systems_of(folder, answers) for folder, answers, _ in read]
    everywhere = [name for names in named for name in names]
    labels = [folder.resolve().name for folder in folders]
    systems: list[str] = []
    answers: list[Answer] = []
    scores: list[Score] = []
    for (_, own_answers, own_scores), names, label in zip(read, named, labels, strict=True):
        called = {name: name if everywhere.count(name) == 1 else f"{label}:{name}" for name in names}
        systems += called.values()
        answers += [msgspec.structs.replace(row, system=called[row.system]) for row in own_answers]
        scores += [
            msgspec.structs.replace(row, system=called[row.system]) for row in own_scores if row.system in called
        ]
    if len(set(systems)) < len(systems):
        raise HycoError(f"folders of the same name: {', '.join(labels)}", "rename one, or give each once")
    return systems, answers, scores


def _notes(
    systems: Sequence[str], baselines: Sequence[str], found: Sequence[Contrast], answers: Sequence[Answer]
) -> list[str]:
    compared = {(one.baseline, one.system) for one in found}
    notes = [
        f"{system} and {baseline} have fewer than two questions in common that are complete: not compared"
        for baseline in baselines
        for system in systems
        if system != baseline and (baseline, system) not in compared
    ]
    for system in systems:
        rows = [row for row in answers if row.system == system]
        failed = sum(row.failure is not None for row in rows)
        if failed:
            notes.append(f"{system}: {failed} of {len(rows)} answers failed; their questions are left out, not imputed")
    return notes


def _left_out(scored: ScoredAnswers, found: Sequence[Contrast]) -> list[str]:
    """A judge's metrics that have scores, and too few for a contrast."""
    there = {(one.system, one.baseline, one.measure) for one in found}
    notes = []
    for system, baseline in dict.fromkeys((one.system, one.baseline) for one in found):
        for measure in filter(is_judged, scored.measures):
            if (system, baseline, measure) in there:
                continue
            empty = [name for name in (system, baseline) if not scored.has_complete(measure, name)]
            why = f"of {' and of '.join(empty)} no question has" if empty else "fewer than two questions have for both"
            notes.append(f"{measure}, {system} against {baseline}: {why} a score in every generation; no contrast")
    return notes
