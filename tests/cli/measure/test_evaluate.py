"""`evaluate` from outside: what it refuses before anything starts, and what a dry run says."""

from pathlib import Path

import pytest

from hyco_export.cli.connection import ConnectOptions
from hyco_export.cli.measure import evaluate
from hyco_export.cli.measure.evaluate import EvaluateOptions, evaluate_run
from hyco_export.cli.measure.set_options import SetOptions
from hyco_export.evaluate.quality.evaluation_folder import Quality
from tests.cli.test_app import refused


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--systems", "hyco,hycoo"), "unknown system 'hycoo'"),
        (("--prompts", "spec-bench"), "--prompts spec-bench names no file next: give spec-bench:FILE"),
        (("--prompts", "nowhere.txt"), "nowhere.txt does not exist"),
        (("--prompts", "0"), "--prompts is 0, it must be at least 1"),
        (("--backend", "npu"), "npu"),
    ],
)
def test_a_wrong_option_is_told_before_anything_is_imported(arguments: tuple[str, ...], message: str) -> None:
    assert message in " ".join(refused("evaluate", *arguments).split())


def test_a_dry_run_counts_and_starts_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluate, "with_server", lambda *_: pytest.fail("a server was started"))
    path = tmp_path / "prompts.txt"
    path.write_text("What is a list?\n\nWhat is a set?\n\nA third one.")
    options = EvaluateOptions(
        ("cloud-mtp", "hyco"),
        "onnx-cpu",
        SetOptions(str(path), limit=2),
        generations=3,
        max_new_tokens=50,
        dry_run=True,
    )
    evaluate_run(None, None, tmp_path / "run", None, options, ConnectOptions())
    said = " ".join(capsys.readouterr().out.split())
    assert "2 questions, 2 turns, 2 systems, 3 generations answers: 12 prompts: " in said
    assert "new tokens: 600 at most; rounds: 120 to 200 for them" in said
    assert not (tmp_path / "run").exists()


def test_qualities_stand_by_task_and_system(capsys: pytest.CaptureFixture[str]) -> None:
    found = [
        Quality("cloud-mtp", "qa", "containment", 30.2, 43, None),
        Quality("hyco", "qa", "containment", 29.5, 43, 1.25),
        Quality("hyco", "rag", "containment", 60.0, 80, None),
    ]
    evaluate._show_quality(found, ["cloud-mtp", "hyco"])
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "qa, containment (43 questions) 30.2 29.5 ±1.2" in lines
    assert "rag, containment (80 questions) 60.0" in lines
