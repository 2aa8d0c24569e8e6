"""`judge` against a fake endpoint: what it prints, keeps and refuses, also after a kill."""

import json
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from hyco_export.cli.measure.judge import NO_PRICES, JudgeOptions, judge_folder
from hyco_export.core.files import folder_lock
from hyco_export.errors import ArtifactError, HycoError
from hyco_export.evaluate.quality.judge.endpoint import Endpoint
from hyco_export.evaluate.quality.judge.log import Prices
from tests.cli.test_app import refused, run
from tests.support.evaluations import read_jsonl, small_evaluation, write_helmet
from tests.support.fake_judge import MODEL, Answer, FakeJudge, completion
from tests.support.interrupts import started
from tests.support.live_server import running

KEY = "sk-secret-0123456789"
OPTIONS = JudgeOptions(None, False, None, (), 2, False, False)


@pytest.fixture(autouse=True)
def no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


@contextmanager
def endpoint(judge: FakeJudge) -> Iterator[Endpoint]:
    """It, behind a real server."""
    with running(judge.app) as url:
        yield Endpoint(MODEL, f"{url}/v1", retries=0)


def test_a_judged_folder_has_replies_scores_and_a_summary_and_no_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_KEY", KEY)
    folder = small_evaluation(tmp_path / "run")
    fake = FakeJudge([completion(f"80 for {KEY}"), completion('{"score": 70}')])
    with endpoint(fake) as place:
        options = ("--base-url", place.base_url, "--key-variable", "JUDGE_KEY", "--price-in", "2", "--price-out", "8")
        done = run("judge", str(folder), "--model", MODEL, "--systems", "hyco, cloud-mtp", "--first-turns", *options)
    assert done.returncode == 0, done.stderr
    assert {headers["authorization"] for headers in fake.headers} == {f"Bearer {KEY}"}
    assert "missing: 1 score, malformed" in done.stdout and "missing: 1 score, no answer" in done.stdout
    assert "asked: 5 calls, 500 tokens sent, 35 of replies, cost 0.00" in done.stdout
    assert done.stdout.endswith(f"\nnext: hyco-export report {folder}\n")
    files = [path for path in folder.iterdir() if path.is_file()]
    assert {path.name for path in files} >= {"judgements.jsonl", "scores.jsonl", "summary.json"}
    assert (
        not [path.name for path in files if KEY.encode() in path.read_bytes()] and KEY not in done.stdout + done.stderr
    )
    assert read_jsonl(folder / "judgements.jsonl")[0]["reply"] == "80 for [key]"
    quality = json.loads((folder / "summary.json").read_bytes())["quality"]
    assert {(row["system"], row["task"], row["value"]) for row in quality if row["task"] == "all"} == {
        ("cloud-mtp", "all", 70.0),
        ("hyco", "all", 70.0),
    }


@pytest.mark.parametrize("stop", [signal.SIGKILL, signal.SIGINT])
def test_a_stopped_run_goes_on_and_asks_for_no_logged_reply_again(tmp_path: Path, stop: signal.Signals) -> None:
    folder = small_evaluation(tmp_path / "run")
    hanging, let_go = threading.Event(), threading.Event()

    def reply(body: dict[str, Any]) -> Answer:
        if len(fake.bodies) == 4:
            hanging.set()
            let_go.wait(60)
        return completion("75")

    fake = FakeJudge(reply)
    with endpoint(fake) as place:
        words = ("judge", str(folder), "--model", MODEL, "--base-url", place.base_url, "--concurrency", "1")
        process = started(*words)
        assert hanging.wait(60)
        process.send_signal(stop)
        said = process.communicate(timeout=60)[1]
        let_go.set()
        if stop is signal.SIGINT:
            assert process.returncode == 130 and f"kept: 3 judgements in {folder}/judgements.jsonl; the same" in said
            assert len(read_jsonl(folder / "scores.jsonl")) == 3 + 1  # and the answer that failed
        logged = read_jsonl(folder / "judgements.jsonl")
        assert len(logged) == 3
        with (folder / "judgements.jsonl").open("ab") as log:
            log.write(b'{"system": "hy')  # half a line
        judge_folder(folder, place, OPTIONS, NO_PRICES)
    rows = read_jsonl(folder / "judgements.jsonl")
    assert rows[:3] == logged and len(rows) == 7 == len({json.dumps(row["asked"]) for row in rows})
    assert len(fake.bodies) == 8  # the one that hung was asked for twice: its reply had not come
    assert [row["value"] for row in read_jsonl(folder / "scores.jsonl")] == [75.0] * 7 + [None]


def test_a_second_call_asks_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, fake = small_evaluation(tmp_path), FakeJudge([completion("75")])
    with endpoint(fake) as place:
        judge_folder(folder, place, OPTIONS, NO_PRICES)
        before = {path.name: path.read_bytes() for path in folder.iterdir()}
        judge_folder(folder, place, OPTIONS, NO_PRICES)
    assert len(fake.bodies) == 7 and "nothing was asked" in capsys.readouterr().out
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_a_dry_run_counts_what_is_left_and_asks_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = small_evaluation(tmp_path)
    before = sorted(path.name for path in folder.iterdir())
    options = JudgeOptions(None, False, None, (), 2, False, True)
    judge_folder(folder, Endpoint(MODEL, "http://127.0.0.1:9/v1"), options, Prices(1_000.0, None))
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "calls 7 of 7, the others are answered" in lines and "tokens of replies, about 70" in lines
    assert any(line.startswith("cost, about 1.") for line in lines)
    assert sorted(path.name for path in folder.iterdir() if path.name != ".lock") == before


def test_an_endpoint_that_is_not_there_ends_in_one_line_and_keeps_what_was_judged(tmp_path: Path) -> None:
    folder = small_evaluation(tmp_path)
    with endpoint(FakeJudge([completion("75")])) as place:
        first = JudgeOptions(("hyco",), False, None, (), 2, False, False)
        judge_folder(folder, place, first, NO_PRICES)
    logged = (folder / "judgements.jsonl").read_bytes()
    said = refused("judge", str(folder), "--model", MODEL, "--base-url", place.base_url, "--retries", "0")
    assert f"error: {place.base_url} cannot be reached: " in said and "next: correct the judge's URL or start" in said
    assert (folder / "judgements.jsonl").read_bytes() == logged
    assert [row["system"] for row in read_jsonl(folder / "scores.jsonl") if row["value"] is not None] == ["hyco"] * 3


def test_books_are_scored_by_helmets_prompts(tmp_path: Path) -> None:
    folder = small_evaluation(tmp_path / "run")
    prompts, references = write_helmet(tmp_path / "helmet")
    said = '{"fluency": 1, "recall": 3, "precision": 1, "sentence_count": 2}'
    fake = FakeJudge(lambda body: completion("50" if len(body["messages"]) == 2 else said))
    with endpoint(fake) as place:
        options = JudgeOptions(None, False, prompts, (references,), 2, False, False)
        judge_folder(folder, place, options, NO_PRICES)
        judge_folder(folder, place, JudgeOptions(("hyco",), True, None, (), 2, False, False), NO_PRICES)
    rows = [row for row in read_jsonl(folder / "scores.jsonl") if row["question"] == "0" and row["value"] is not None]
    assert {row["metric"]: row["value"] for row in rows} == {
        "fluency": 100.0,
        "recall": 100.0,
        "precision": 50.0,
        "f1": pytest.approx(200 / 3),
    }


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"systems": ("hyco", "plain")}, "--systems names 'plain'; the evaluation has cloud-mtp, hyco"),
        ({"systems": ()}, "--systems names no system"),
        ({"helmet_prompts": Path("prompts.py")}, "--helmet-prompts without --helmet-references"),
        ({"helmet_references": (Path("keys.jsonl"),)}, "--helmet-references without --helmet-prompts"),
    ],
)
def test_options_that_do_not_fit_are_refused(tmp_path: Path, changed: dict[str, Any], message: str) -> None:
    folder = small_evaluation(tmp_path)
    values = {name: getattr(OPTIONS, name) for name in OPTIONS.__struct_fields__} | changed
    with pytest.raises(HycoError) as caught:
        judge_folder(folder, Endpoint(MODEL), JudgeOptions(**values), NO_PRICES)
    assert message in caught.value.message and caught.value.hint
    assert not (folder / "judgements.jsonl").exists()


def test_references_of_other_questions_are_refused(tmp_path: Path) -> None:
    folder = small_evaluation(tmp_path / "run")
    prompts, references = write_helmet(tmp_path / "helmet")
    references.write_text(references.read_text().replace('"id":0', '"id":"other"'))
    options = JudgeOptions(None, False, prompts, (references,), 2, False, False)
    with pytest.raises(HycoError, match="no question of the evaluation is among the references: its first is '161'"):
        judge_folder(folder, Endpoint(MODEL), options, NO_PRICES)


def test_a_folder_that_is_being_worked_in_is_left_alone(tmp_path: Path) -> None:
    folder = small_evaluation(tmp_path)
    with folder_lock(folder, "evaluation", "working", "another folder"), pytest.raises(ArtifactError, match="another"):
        judge_folder(folder, Endpoint(MODEL, "http://127.0.0.1:9/v1"), OPTIONS, NO_PRICES)


def test_what_cannot_be_judged_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="holds no evaluation"):
        judge_folder(tmp_path, Endpoint(MODEL), OPTIONS, NO_PRICES)
    folder = small_evaluation(tmp_path / "run")
    with pytest.raises(HycoError, match="no key in the environment variable OPENAI_API_KEY"):
        judge_folder(folder, Endpoint(MODEL), OPTIONS, NO_PRICES)
    assert not (folder / "scores.jsonl").read_bytes() and not (folder / "summary.json").exists()
