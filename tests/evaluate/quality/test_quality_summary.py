"""The summary's parts: of one folder, of several, and beside what other commands wrote."""

from pathlib import Path

import pytest

from hyco_export.errors import HycoError
from hyco_export.evaluate.quality.evaluation_folder import NoSaving, read_summary, replace_scores, update_summary
from hyco_export.evaluate.quality.quality_summary import summarise, write_quality
from tests.support.evaluations import BASELINE, OTHER, SYSTEM, answer, score, small_evaluation, write_evaluation


def judged(folder: Path, systems: tuple[str, ...] = (BASELINE, SYSTEM), value: float = 80.0) -> Path:
    """Two questions with a score each, for every system."""
    answers = [answer(name, question) for name in systems for question in "ab"]
    return write_evaluation(folder, answers, [score(row, value) for row in answers], systems)


def test_the_first_system_of_the_plan_is_the_baseline(tmp_path: Path) -> None:
    found = summarise([judged(tmp_path, (BASELINE, OTHER, SYSTEM))])
    assert found.baselines == (BASELINE,)
    assert {(row.system, row.measure) for row in found.contrasts} == {
        (name, measure) for name in (OTHER, SYSTEM) for measure in ("g", "judge")
    }


def test_several_baselines_and_one_that_is_not_there(tmp_path: Path) -> None:
    judged(tmp_path, (BASELINE, OTHER, SYSTEM))
    found = summarise([tmp_path], [OTHER, BASELINE, OTHER])
    assert found.baselines == (OTHER, BASELINE)
    assert {row.baseline for row in found.contrasts} == {OTHER, BASELINE}
    assert set(found.questions_without_saving) == {BASELINE, SYSTEM}
    with pytest.raises(HycoError, match=r"'hycoo' is none of the systems here \(give one of cloud-mtp, "):
        summarise([tmp_path], ["hycoo"])


def test_systems_of_the_same_name_are_told_apart_by_their_folders(tmp_path: Path) -> None:
    before, after = judged(tmp_path / "before"), judged(tmp_path / "after", (SYSTEM,), 70.0)
    found = summarise([before, after], [f"before:{SYSTEM}"])
    assert found.systems == (BASELINE, f"before:{SYSTEM}", f"after:{SYSTEM}")
    change = {row.system: row.estimate for row in found.contrasts if row.measure == "judge"}
    assert change == {BASELINE: 0.0, f"after:{SYSTEM}": -10.0}
    with pytest.raises(HycoError, match="folders of the same name: before, before"):
        summarise([before, before])


def test_what_could_not_be_compared_is_said(tmp_path: Path) -> None:
    notes = summarise([small_evaluation(tmp_path)]).notes
    assert notes == ("hyco: 1 of 4 answers failed; their questions are left out, not imputed",)
    alone = write_evaluation(tmp_path / "alone", [answer(BASELINE, "a"), answer(SYSTEM, "b")])
    assert summarise([alone]).notes == (
        "hyco and cloud-mtp have fewer than two questions in common that are complete: not compared",
    )


def test_scores_of_references_and_of_the_judge_are_summed_up_and_other_parts_stay(tmp_path: Path) -> None:
    judged(tmp_path)
    replace_scores(tmp_path, ["rougeL"], [score(answer(SYSTEM, "a"), 30.0, "rougeL")])
    stale = {"system": SYSTEM, "task": "all", "metric": "judge", "value": 1.0, "count": 1, "run_sd": None}
    update_summary(tmp_path, {"coverage": {SYSTEM: [2, 2]}, "quality": [stale]})
    for _ in range(2):  # the second time nothing is added
        write_quality(tmp_path, summarise([tmp_path]))
        summary = read_summary(tmp_path)
        assert [(row.metric, row.task) for row in summary.quality] == [
            ("rougeL", "translation"),
            *[("judge", "all")] * 2,
        ]
        assert [row.value for row in summary.quality] == [30.0, 80.0, 80.0]
        assert summary.coverage == {SYSTEM: (2, 2)} and not summary.screen


def test_readers_of_the_summary_find_what_was_worked_out(tmp_path: Path) -> None:
    found = summarise([judged(tmp_path)])
    write_quality(tmp_path, found)
    summary = read_summary(tmp_path)
    assert summary.contrasts == found.contrasts and [row.measure for row in summary.contrasts] == ["g", "judge"]
    assert summary.questions_without_saving == {SYSTEM: (NoSaving(0, 2, 2, 1.0, ("a", "b")),)}
