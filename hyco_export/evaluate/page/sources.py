"""What a page is made from: each folder that was given, read as the validation, benchmark, evaluation or traces it is.

A run folder stands for everything that lies in it: its validation with traces, its benchmark, its evaluation.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np

from hyco_export.core.keepset import KeepSet
from hyco_export.errors import ArtifactError, HycoError
from hyco_export.evaluate.metrics import SystemMetrics, measure, without_evidence
from hyco_export.evaluate.quality.evaluation_folder import (
    NOT_TRACES,
    Answer,
    Score,
    Summary,
    answers_so_far,
    is_evaluation,
    read_json,
    read_scores,
    read_summary,
)
from hyco_export.evaluate.report import FINISHED
from hyco_export.evaluate.report import JSON_NAME as REPORT_FILE
from hyco_export.evaluate.traces import PLAN_FILE, PROGRESS_FILE, read_traces
from hyco_export.protocol.trace import GenerationTrace, from_lines

Kind = Literal["validation", "benchmark", "evaluation", "traces"]
REPORT_FOLDER, BENCH_FOLDER, EVALUATION_FOLDER = "validate", "bench", "evaluation"  # in a run folder
TRACE_FOLDERS = ("traces", REPORT_FOLDER)  # of a run folder, where a validation's traces may lie
RESULT_FILE = "systems.json"  # of a finished benchmark
TRACE_SUFFIX = ".jsonl"
JSON_MAP = dict[str, Any]
SAME = 1e-3  # relative: figures that were computed from the same times differ less
WITH_EVIDENCE = (
    "The means of bytes down count the p~ that was asked for to log the rounds; distributions and rounds leave it out."
)
DAMAGED = "make it again, or leave the folder out"
HINT = "give a run folder, or the folder of a benchmark, an evaluation or traces"


class NothingMeasured(HycoError):
    """A folder whose first generation was not finished."""


class Evaluation(msgspec.Struct, frozen=True):
    """What an evaluation's folder holds beside its traces; what is not there yet is empty."""

    answers: tuple[Answer, ...]
    scores: tuple[Score, ...]
    summary: Summary

    @property
    def failures(self) -> tuple[Answer, ...]:
        """Generations that came to nothing."""
        return tuple(answer for answer in self.answers if answer.failure is not None)


class Source(msgspec.Struct, frozen=True):
    """One folder's measurements.

    Attributes:
        name: short and unique on the page.
        systems: their figures as the folder's JSON has them, or measured from the traces where it has none.
        traces: generations by system; none where they were not kept.
        plan: what was run and on what, by field.
        report: the JSON of a validation.
        keepset_known: is it known which bonus tokens lie outside the keep set.
        traces_at: folder of the traces, or their file.
    """

    name: str
    kind: Kind
    folder: str
    systems: tuple[SystemMetrics, ...]
    traces: dict[str, tuple[GenerationTrace, ...]] = {}
    plan: dict[str, Any] = {}
    report: dict[str, Any] | None = None
    evaluation: Evaluation | None = None
    keepset_known: bool = True
    traces_at: str = ""
    notes: tuple[str, ...] = ()

    @property
    def baseline(self) -> SystemMetrics:
        """The system that the others are compared with: the first that asks a server, or the first."""
        return next((system for system in self.systems if system.rounds), self.systems[0])

    @property
    def rounds(self) -> int:
        """Recorded verify rounds."""
        return sum(len(trace.rounds) for traces in self.traces.values() for trace in traces)

    @property
    def verifier(self) -> str:
        """Digest of the verifier's checkpoint; "" where the folder does not say."""
        server = self.report.get("server", {}) if self.report else {}
        return str(self.plan.get("verifier") or server.get("verifier_digest", ""))


def read_sources(paths: Sequence[Path]) -> tuple[Source, ...]:
    """Everything that lies in the folders (or JSON lines files of traces), in their order, with names that differ.

    Raises:
        HycoError: one that holds nothing to show.
        ArtifactError: a damaged file.
    """
    found: list[Source] = []
    for path in paths:
        known = {one.folder for one in found}
        found += [one for one in _read(path) if one.folder not in known]
    names: dict[str, int] = {}
    unique = []
    for one in found:
        names[one.name] = names.get(one.name, 0) + 1
        suffix = f" ({names[one.name]})" if names[one.name] > 1 else ""
        unique.append(msgspec.structs.replace(one, name=one.name + suffix))
    return tuple(unique)


def is_run(folder: Path) -> bool:
    """Is it a run folder: it has a validation or an artifact in it."""
    return (folder / REPORT_FOLDER / REPORT_FILE).is_file() or any(folder.glob("*/manifest.json"))


def run_of(path: Path) -> Path | None:
    """The run folder that a given path is or lies in; None outside one."""
    resolved = path.resolve()
    return next((folder for folder in (resolved, resolved.parent) if is_run(folder)), None)


def _read(path: Path) -> Iterator[Source]:
    """The sources of one path."""
    if path.is_file():
        yield _measured(path.stem, path, _grouped(read_traces(path)))
        return
    if not path.is_dir():
        raise HycoError(f"{path} does not exist", HINT)
    if is_evaluation(path):
        yield _evaluation(path)
    elif (path / PLAN_FILE).is_file():
        yield _bench(path)
    elif is_run(path):
        inner = tuple(_in_run(path))
        if not inner:
            raise HycoError(
                f"run folder {path} holds no measurement yet",
                "measure first: hyco-export validate, or hyco-export bench",
            )
        yield from inner
    elif files := _trace_files(path):
        yield _measured(path.name, path, _by_system(files))
    else:
        raise HycoError(f"{path} holds no plan, report or traces", HINT)


def _in_run(run: Path) -> Iterator[Source]:
    """What was measured of a run: validation (and traces of another one), benchmark, evaluation."""
    if (run / REPORT_FOLDER / REPORT_FILE).is_file():
        yield from _validation(run)
    for name in (BENCH_FOLDER, EVALUATION_FOLDER):
        folder = run / name
        with suppress(NothingMeasured):  # it was stopped in its first generation
            if is_evaluation(folder):
                yield _evaluation(folder)
            elif (folder / PLAN_FILE).is_file():
                yield _bench(folder)


def _validation(run: Path) -> Iterator[Source]:
    path = run / REPORT_FOLDER / REPORT_FILE
    report = read_json(path, JSON_MAP, DAMAGED)
    name = f"{run.resolve().name}/{REPORT_FOLDER}"
    folder = next((run / name for name in TRACE_FOLDERS if _trace_files(run / name)), None)
    traces = _by_system(_trace_files(folder)) if folder else {}
    if report.get("verdict") not in FINISHED:
        yield Source(name, "validation", str(path.parent), (), report=report)
        if folder:
            yield _measured(f"{run.resolve().name}/{folder.name}", folder, traces)
        return
    systems = systems_from_json(report["systems"], path)
    if traces and not _belong(systems, traces):
        yield Source(name, "validation", str(path.parent), systems, plan=_told(report), report=report)
        yield _measured(f"{run.resolve().name}/traces", folder or run, traces)
        return
    notes = (WITH_EVIDENCE,) if has_evidence(traces) else ()
    yield Source(
        name, "validation", str(path.parent), systems, traces, _told(report), report, notes=notes, traces_at=str(folder)
    )


def _told(report: Mapping[str, Any]) -> dict[str, Any]:
    """What a validation's report says of how it was run, in a plan's words."""
    fields = ("recipe", "target", "backend", "sampling", "epsilon", "max_new_tokens", "started_at", "version")
    server = report.get("server", {})
    return {name: report[name] for name in fields if name in report} | {
        "server": server.get("server", ""),
        "clock": server.get("clock", ""),
    }


def _bench(folder: Path) -> Source:
    return _with_plan(folder, "benchmark", _finished(folder / RESULT_FILE))


def _evaluation(folder: Path) -> Source:
    evaluation = Evaluation(answers_so_far(folder), tuple(read_scores(folder)), read_summary(folder))
    rows = evaluation.summary.systems or _finished(folder / RESULT_FILE)
    return msgspec.structs.replace(_with_plan(folder, "evaluation", rows), evaluation=evaluation)


def _finished(result: Path) -> list[dict[str, Any]]:
    """The figures of a finished benchmark; none of one that was stopped."""
    return read_json(result, list[dict[str, Any]], DAMAGED) if result.is_file() else []


def _with_plan(folder: Path, kind: Kind, rows: Sequence[dict[str, Any]]) -> Source:
    """A folder of generations with the figures that it says, or those of the generations so far."""
    plan = read_json(folder / PLAN_FILE, JSON_MAP, DAMAGED) if (folder / PLAN_FILE).is_file() else {}
    traces = _by_system(_trace_files(folder))
    if not rows:
        note = f"{folder} was not finished: figures are of what is there."
        return _measured(_name(folder), folder, traces, plan, kind, (note,))
    systems = systems_from_json(rows, folder)
    notes = _other_times(systems, traces)
    return Source(_name(folder), kind, str(folder), systems, traces, plan, notes=notes, traces_at=str(folder))


def _measured(
    name: str,
    folder: Path,
    traces: Mapping[str, tuple[GenerationTrace, ...]],
    plan: dict[str, Any] | None = None,
    kind: Kind = "traces",
    notes: tuple[str, ...] = (),
) -> Source:
    """A source whose figures are measured here.

    Raises:
        NothingMeasured: no trace has a round.
    """
    found = {system: kept for system, kept in traces.items() if any(one.rounds or one.locals for one in kept)}
    if not found:
        raise NothingMeasured(f"{folder} holds no finished generation with a round", HINT)
    highest = max(max(trace.tokens, default=0) for kept in found.values() for trace in kept)
    everything = KeepSet(np.arange(highest + 1), highest + 1)  # nothing outside: misses are not shown
    systems = tuple(measure(name, [without_evidence(one) for one in kept], everything) for name, kept in found.items())
    return Source(
        name, kind, str(folder), systems, found, plan or {}, keepset_known=False, notes=notes, traces_at=str(folder)
    )


def _other_times(
    systems: Sequence[SystemMetrics], traces: Mapping[str, tuple[GenerationTrace, ...]]
) -> tuple[str, ...]:
    """A note where the figures are in the times of a profiled device: rounds and distributions are as measured."""
    for system in systems:
        tokens = sum(len(trace.tokens) for trace in traces.get(system.system, ()))
        if not tokens or system.disturbances.calls:
            continue
        here = _draft_ms(traces[system.system]) / tokens
        if abs(here - system.draft_ms_per_token) > SAME * max(here, system.draft_ms_per_token):
            return (
                "The figures per token count head and SLM in the times of a profiled device; distributions and rounds "
                "show them as they were measured on this machine.",
            )
    return ()


def _draft_ms(traces: Sequence[GenerationTrace]) -> float:
    """What the device drafted, as `metrics.measure` counts it."""
    of_rounds = sum(record.draft_ms + record.ahead_ms for trace in traces for record in trace.rounds)
    return of_rounds + sum(record.draft_ms for trace in traces for record in trace.locals)


def systems_from_json(rows: Any, path: Path) -> tuple[SystemMetrics, ...]:
    """Figures of systems as JSON has them: what was not measured is null there and nan here.

    Raises:
        ArtifactError: they are something else.
    """
    try:
        filled = [{key: float("nan") if value is None else value for key, value in row.items()} for row in rows]
        return msgspec.convert(filled, tuple[SystemMetrics, ...])
    except (AttributeError, TypeError, msgspec.ValidationError) as error:
        raise ArtifactError(f"{path}: these are no figures of systems: {error}", "measure again") from error


def has_evidence(traces: Mapping[str, Sequence[GenerationTrace]]) -> bool:
    """Does a round say what it was judged by, so that it can be replayed."""
    return any(record.evidence for kept in traces.values() for trace in kept for record in trace.rounds)


def _belong(systems: Sequence[SystemMetrics], traces: Mapping[str, tuple[GenerationTrace, ...]]) -> bool:
    """Are these the traces that the figures were measured from."""
    return all(system.rounds == sum(len(trace.rounds) for trace in traces.get(system.system, ())) for system in systems)


def _trace_files(folder: Path) -> list[Path]:
    return sorted(
        path for path in folder.glob(f"*{TRACE_SUFFIX}") if path.name not in NOT_TRACES and path.stat().st_size
    )


def _by_system(files: Sequence[Path]) -> dict[str, tuple[GenerationTrace, ...]]:
    """The finished generations of the files of one folder; what a run that goes on, or was killed, has not recorded yet
    is left out."""
    progress = files[0].parent / PROGRESS_FILE if files else Path()
    sizes = read_json(progress, JSON_MAP, DAMAGED) if progress.is_file() else {}
    found: list[GenerationTrace] = []
    for file in files:
        if file.stem not in sizes:
            found += read_traces(file)
            continue
        try:
            found += from_lines(file.read_bytes()[: sizes[file.stem]].splitlines())
        except (msgspec.DecodeError, ValueError) as error:
            raise ArtifactError(f"{file} is not a trace: {error}", HINT) from error
    return _grouped(found)


def _grouped(traces: Sequence[GenerationTrace]) -> dict[str, tuple[GenerationTrace, ...]]:
    systems = dict.fromkeys(trace.system for trace in traces)
    return {system: tuple(trace for trace in traces if trace.system == system) for system in systems}


def _name(folder: Path) -> str:
    """The folder's name, behind its run's where it lies in one."""
    resolved = folder.resolve()
    return f"{resolved.parent.name}/{resolved.name}" if is_run(resolved.parent) else resolved.name
