"""`contrast`: what it prints, writes and refuses."""

import json
from pathlib import Path

import pytest

from hyco_export.cli.measure.contrast import contrast_folders
from hyco_export.core.files import folder_lock
from hyco_export.errors import ArtifactError, HycoError
from tests.cli.test_app import run
from tests.support.evaluations import BASELINE, SYSTEM, answer, score, write_evaluation


def evaluation(folder: Path, judged: bool = True) -> Path:
    """Two tasks of two questions; `hyco` is faster everywhere but at one, and 30 points worse at another."""
    answers, scores = [], []
    for name, gain in ((BASELINE, 0.0), (SYSTEM, 1.0)):
        for number, task in enumerate(("rag", "rag", "translation", "translation")):
            ms = 50.0 - gain * (20.0 if number else 0.0)
            answers.append(answer(name, str(number), task, server_ms=ms))
            scores.append(score(answers[-1], 90.0 - gain * (30.0 if number == 3 else 0.0)))
    return write_evaluation(folder, answers, scores if judged else [])


def test_contrasts_are_printed_and_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = evaluation(tmp_path / "run")
    contrast_folders([folder], [], tmp_path / "table.json")
    said = capsys.readouterr().out
    lines = [line.split() for line in said.splitlines()]
    assert ["hyco", "cloud-mtp", "g", "all", "-30.0%", "-40.0%", "-10.0%", "4"] in lines
    assert any(line[:5] == ["hyco", "cloud-mtp", "judge", "translation", "(exploratory)"] for line in lines)
    assert "hyco: 1 of 4 questions without saving, generation 0: 0" in said
    assert "hyco: judge score 20 points or more lower at 1, higher at 0: 3" in said
    assert said.endswith(f" report {folder}\n")
    table, summary = (json.loads(path.read_bytes()) for path in (tmp_path / "table.json", folder / "summary.json"))
    assert table["contrasts"] == summary["contrasts"] and len(table["contrasts"]) == 6
    assert table["baselines"] == [BASELINE]


def test_a_judge_without_a_complete_question_has_no_value_and_the_missing_contrast_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of hyco every question lacks the score of one generation."""
    answers = [
        answer(name, question, generation=run)
        for name in (BASELINE, SYSTEM)
        for question in ("0", "1", "2")
        for run in (0, 1)
    ]
    scores = [score(one, 70.0) for one in answers if one.system == BASELINE or one.generation == 0]
    contrast_folders([write_evaluation(tmp_path, answers, scores)], [], None)
    said = capsys.readouterr().out
    assert (
        "note: judge, hyco against cloud-mtp: of hyco no question has a score in every generation; no contrast" in said
    )
    summary = json.loads((tmp_path / "summary.json").read_bytes())
    assert [(row["system"], row["count"]) for row in summary["quality"]] == [(BASELINE, 3)]
    assert {row["measure"] for row in summary["contrasts"]} == {"g"}


def test_of_several_folders_nothing_is_written(tmp_path: Path) -> None:
    folders = [evaluation(tmp_path / "before"), evaluation(tmp_path / "after")]
    contrast_folders(folders, ["before:hyco"], None)
    assert not [path for folder in folders for path in folder.glob("summary.json")]


def test_a_folder_that_is_being_worked_in_is_left_alone(tmp_path: Path) -> None:
    folder = evaluation(tmp_path)
    with folder_lock(folder, "evaluation", "working", "another folder"), pytest.raises(ArtifactError, match="another"):
        contrast_folders([folder], [], None)
    assert not (folder / "summary.json").exists()


def test_the_command_line_says_what_comes_next(tmp_path: Path) -> None:
    folder = evaluation(tmp_path / "a run", judged=False)
    done = run("contrast", str(folder))
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith(f"\nnext: hyco-export judge '{folder}' --model MODEL\n")
    with pytest.raises(HycoError, match="none of the systems here"):
        contrast_folders([folder], ["hycoo"], None)
