"""`evaluate` from outside: what it refuses before anything starts, and what a dry run says."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from hyco_export.cli.connection import ConnectOptions
from hyco_export.cli.measure import evaluate
from hyco_export.cli.measure.evaluate import EvaluateOptions, evaluate_run
from hyco_export.cli.measure.set_options import SetOptions
from hyco_export.core.data.conversations import Message
from hyco_export.evaluate.quality.evaluation_folder import Quality, read_scores, read_summary
from hyco_export.evaluate.quality.judge.endpoint import Endpoint
from hyco_export.evaluate.quality.prompt_sets import Question
from tests.cli.test_app import refused
from tests.support.evaluations import answer, score, small_evaluation, write_evaluation
from tests.support.fake_judge import MODEL, FakeJudge, completion
from tests.support.live_server import running


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--systems", "hyco,hycoo"), "unknown system 'hycoo'"),
        (("--prompts", "spec-bench"), "--prompts spec-bench names no file next: give spec-bench:FILE"),
        (("--prompts", "nowhere.txt"), "nowhere.txt does not exist"),
        (("--prompts", "0"), "--prompts is 0, it must be at least 1"),
        (("--backend", "npu"), "npu"),
        (("--judge", "a-model", "--judge-url", "ftp://judge"), "the judge's URL 'ftp://judge' is no http(s) URL"),
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


def test_behind_the_answers_comes_the_judge_or_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = small_evaluation(tmp_path)
    evaluate._judge(folder, None)
    assert capsys.readouterr().out.endswith(f" report {folder}\n")
    fake = FakeJudge([completion("75")])
    with running(fake.app) as url:
        evaluate._judge(folder, Endpoint(MODEL, f"{url}/v1"))
    assert capsys.readouterr().out.endswith(f" report {folder}\n")
    assert len(fake.bodies) == 7 and {row.value for row in read_scores(folder)} == {75.0, None}


def test_scores_by_references_and_contrasts_come_with_the_answers(tmp_path: Path) -> None:
    rows = [answer(system, question, "qa") for system in ("cloud-mtp", "hyco") for question in "ab"]
    judged = score(rows[0], 80.0)
    folder = write_evaluation(tmp_path, rows, [judged])
    asked = tuple(Question(name, "qa", "qa", ((Message("user", "?"),),), ("of hyco to b",)) for name in "ab")
    answered = SimpleNamespace(questions=asked, answers=rows, coverage={"cloud-mtp": (2, 2), "hyco": (2, 2)})
    found = evaluate._summarised(answered, [], folder)
    assert [(one.system, one.metric, one.value) for one in found.quality] == [
        ("cloud-mtp", "containment", 0.0), ("hyco", "containment", 50.0), ("cloud-mtp", "judge", 80.0),
    ]  # fmt: skip
    summary = read_summary(folder)
    assert summary.quality == found.quality and summary.coverage == {"cloud-mtp": (2, 2), "hyco": (2, 2)}
    assert [one.measure for one in summary.contrasts] == ["g", "containment"] and judged in read_scores(folder)
