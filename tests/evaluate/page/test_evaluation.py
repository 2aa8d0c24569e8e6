"""An evaluation's folder."""

from pathlib import Path

import pytest

from hyco_export.errors import ArtifactError
from hyco_export.evaluate.page.evaluation import is_evaluation, read_evaluation
from tests.evaluate.page.folders import write_lines

ROW = {"system": "hyco", "question": "q0", "task": "qa", "turn": 2, "generation": 1}


def test_of_an_answer_that_was_tried_again_the_newest_row_counts(tmp_path: Path) -> None:
    write_lines(tmp_path / "answers.jsonl", [{**ROW, "failure": "busy"}, {**ROW, "ids": [5], "failure": None}])
    found = read_evaluation(tmp_path)
    assert [(one.prompt_id, one.ids) for one in found.answers] == [("q0/turn2", (5,))]
    assert not found.failures and not found.summary.systems


def test_a_row_that_a_kill_cut_short_is_passed_over(tmp_path: Path) -> None:
    write_lines(tmp_path / "answers.jsonl", [ROW])
    with (tmp_path / "answers.jsonl").open("ab") as file:
        file.write(b'{"system": "hy')
    assert is_evaluation(tmp_path) and len(read_evaluation(tmp_path).answers) == 1


def test_a_damaged_row_is_named(tmp_path: Path) -> None:
    (tmp_path / "answers.jsonl").write_bytes(b'{"system": 1}\n')
    with pytest.raises(ArtifactError, match=r"answers.jsonl, line 1, cannot be read"):
        read_evaluation(tmp_path)
    (tmp_path / "answers.jsonl").unlink()
    (tmp_path / "summary.json").write_text("[]")
    with pytest.raises(ArtifactError, match=r"summary.json cannot be read"):
        read_evaluation(tmp_path)
    assert not is_evaluation(tmp_path / "nowhere")
