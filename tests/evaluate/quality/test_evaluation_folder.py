"""Answers and scores of a folder: what is read, replaced and refused."""

from pathlib import Path

import msgspec
import pytest

from hyco_export.errors import ArtifactError
from hyco_export.evaluate.quality.evaluation_folder import (
    Summary,
    answers_so_far,
    is_evaluation,
    read_answers,
    read_scores,
    read_summary,
    replace_scores,
    systems_of,
    update_summary,
)
from tests.support.evaluations import BASELINE, SYSTEM, answer, score, small_evaluation, write_evaluation


def test_of_an_answer_that_was_tried_again_the_newest_row_counts(tmp_path: Path) -> None:
    failed, good = answer(SYSTEM, "1", text="", failure="timed out"), answer(SYSTEM, "1", tokens=12)
    write_evaluation(tmp_path, [failed, answer(SYSTEM, "2"), good])
    found = {row.question: row for row in read_answers(tmp_path)}
    assert found == {"1": good, "2": answer(SYSTEM, "2")}


def test_the_plan_says_which_system_comes_first(tmp_path: Path) -> None:
    rows = [answer(SYSTEM, "1"), answer("extra", "1"), answer(BASELINE, "1")]
    write_evaluation(tmp_path, rows, systems=["not-begun", BASELINE, SYSTEM])
    assert systems_of(tmp_path, rows) == [BASELINE, SYSTEM, "extra"]
    (tmp_path / "plan.json").unlink()
    assert systems_of(tmp_path, rows) == [SYSTEM, "extra", BASELINE]


def test_scores_are_replaced_by_metric(tmp_path: Path) -> None:
    row = answer(SYSTEM, "1")
    write_evaluation(tmp_path, [row], [score(row, 1.0, "accuracy"), score(row, 50.0, "judge")])
    replace_scores(tmp_path, ["judge"], [score(row, None, "judge", "refused")])
    assert read_scores(tmp_path) == [score(row, 1.0, "accuracy"), score(row, None, "judge", "refused")]
    assert not list(tmp_path.glob("*.draft"))


def test_a_summary_keeps_its_other_parts(tmp_path: Path) -> None:
    assert read_summary(tmp_path) == Summary()
    update_summary(tmp_path, {"coverage": {"hyco": [3, 4]}, "contrasts": [1], "of a later release": 2})
    update_summary(tmp_path, {"contrasts": []})
    assert read_summary(tmp_path) == Summary(coverage={"hyco": (3, 4)})
    assert msgspec.json.decode((tmp_path / "summary.json").read_bytes())["of a later release"] == 2


def test_a_row_that_a_kill_cut_short_is_passed_over(tmp_path: Path) -> None:
    row = answer(SYSTEM, "1")
    write_evaluation(tmp_path, [row])
    with (tmp_path / "answers.jsonl").open("ab") as file:
        file.write(b'{"system": "hy')
    assert is_evaluation(tmp_path) and read_answers(tmp_path) == (row,)
    assert not is_evaluation(tmp_path / "nowhere") and not answers_so_far(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("answers.jsonl", b'{"system": "hyco"}\n', "answers.jsonl, line 1, cannot be read: Object missing"),
        ("answers.jsonl", b"\n", "holds no answer yet"),
        ("plan.json", b"[]", "plan.json cannot be read"),
        ("summary.json", b"[]", "summary.json cannot be read"),
        ("scores.jsonl", b'\n{"system": \xff}\n', "scores.jsonl, line 2, cannot be read"),
    ],
)
def test_damaged_files_are_named(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    small_evaluation(tmp_path)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ArtifactError, match=message):
        systems_of(tmp_path, read_answers(tmp_path))
        read_scores(tmp_path)
        read_summary(tmp_path)


def test_a_folder_without_answers_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"holds no evaluation \(no answers.jsonl\)"):
        read_answers(tmp_path)
