"""What is asked about which answer, that no reply is asked for twice, and the scores of the replies."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx2
import pytest

from hyco_export.errors import HycoError
from hyco_export.evaluate.quality.evaluation_folder import Answer as EvaluationAnswer
from hyco_export.evaluate.quality.evaluation_folder import read_answers
from hyco_export.evaluate.quality.judge.endpoint import Endpoint, JudgeClient
from hyco_export.evaluate.quality.judge.helmet import read_books, read_prompts
from hyco_export.evaluate.quality.judge.judging import (
    NO_BOOKS,
    Books,
    JudgeRequest,
    Size,
    estimate,
    judge,
    requests_for,
    scores,
    unanswered,
)
from hyco_export.evaluate.quality.judge.log import JudgementLog
from tests.support.evaluations import SYSTEM, answer, small_evaluation, write_helmet
from tests.support.fake_judge import MODEL, Answer, FakeJudge, completion, failure

LOCAL = "http://127.0.0.1:8000/v1"


@pytest.fixture(autouse=True)
def no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


@pytest.fixture
def answers(tmp_path: Path) -> tuple[EvaluationAnswer, ...]:
    return read_answers(small_evaluation(tmp_path))


@pytest.fixture
def books(tmp_path: Path) -> Books:
    prompts, references = write_helmet(tmp_path / "helmet")
    return Books(read_prompts(prompts), read_books([references]))


def run(endpoint: FakeJudge, requests: Sequence[JudgeRequest], log: JudgementLog, concurrency: int = 3) -> Size:
    """Send the requests; a retry is not worth waiting for here."""
    steps: list[tuple[str, int, int]] = []

    async def call() -> Size:
        async with JudgeClient(Endpoint(MODEL, LOCAL, retries=0), endpoint.transport) as client:
            return await judge(requests, client, log, concurrency, lambda *step: steps.append(step))

    size = asyncio.run(call())
    assert [done for _, done, _ in steps] == [*range(1, len(requests) + 1)]
    return size


def asked(body: dict[str, Any]) -> str:
    """What a request is about: the last message's text."""
    return str(body["messages"][-1]["content"])


def test_every_answer_is_asked_about_once(answers: list[EvaluationAnswer], tmp_path: Path) -> None:
    requests = requests_for(answers, MODEL, NO_BOOKS, first_turns=False)
    assert len(requests) == 7 == len({request.key for request in requests})  # of 8 answers one failed
    second = [request for request in requests if request.key.turn == 2]
    assert len(second) == 2 and all("question 81, turn 1" in request.messages[1]["content"] for request in second)
    assert len(requests_for(answers, MODEL, NO_BOOKS, first_turns=True)) == 5
    endpoint, log = FakeJudge([completion('{"score": 80}')]), JudgementLog(tmp_path)
    assert run(endpoint, requests, log) == Size(7, 700, 49)
    assert Counter(map(asked, endpoint.bodies)) == Counter(request.messages[1]["content"] for request in requests)
    assert unanswered(requests, log, retry_missing=True) == []


def test_a_later_turn_is_judged_with_the_same_systems_own_first_answer() -> None:
    rows = [answer(SYSTEM, "81", turn=turn, generation=run) for run in (0, 1) for turn in (2, 1)]
    rows.append(answer(SYSTEM, "82", turn=2))  # its first turn failed
    requests = requests_for(rows, MODEL, NO_BOOKS, first_turns=False)
    assert [(one.key.turn, one.key.generation) for one in requests] == [(2, 0), (1, 0), (2, 1), (1, 1)]
    assert f"answer of {SYSTEM} to 81, turn 1, generation 1" in requests[2].messages[1]["content"]
    assert "generation 0" not in requests[2].messages[1]["content"]


def test_books_get_helmets_requests_and_everything_else_the_question(
    answers: list[EvaluationAnswer], books: Books, tmp_path: Path
) -> None:
    requests = requests_for(answers, MODEL, books, first_turns=False)
    assert Counter(request.key.metric for request in requests) == {
        "judge": 6,
        "fluency": 1,
        "recall": 1,
        "precision": 1,
    }

    def reply(body: dict[str, Any]) -> Answer:
        said = {
            "Fluent": '{"fluency": 1}',
            "Points": '{"recall": 2}',
            "Expert": '{"precision": 1, "sentence_count": 4}',
        }
        return completion(next((text for start, text in said.items() if asked(body).startswith(start)), "50"))

    log = JudgementLog(tmp_path)
    run(FakeJudge(reply), requests, log)
    found = {(row.system, row.metric): row for row in scores(answers, MODEL, books, False, log) if row.question == "0"}
    values = {metric: row.value for (system, metric), row in found.items() if system == "cloud-mtp"}
    recall, precision = 200 / 3, 25.0
    expected = {"fluency": 100.0, "recall": recall, "precision": precision}
    assert values == pytest.approx({**expected, "f1": 2 * recall * precision / (recall + precision)})
    failed = {metric: (row.value, row.reason) for (system, metric), row in found.items() if system == SYSTEM}
    assert failed == dict.fromkeys(("fluency", "recall", "precision", "f1"), (None, "no answer: server went away"))


def test_f1_is_missing_where_a_part_is(answers: list[EvaluationAnswer], books: Books, tmp_path: Path) -> None:
    log = JudgementLog(tmp_path)
    requests = [one for one in requests_for(answers, MODEL, books, False) if one.key.question == "0"]
    run(FakeJudge([completion('{"fluency": 1}')]), requests, log)
    (row,) = [one for one in scores(answers, MODEL, books, False, log) if one.metric == "f1" and one.system != SYSTEM]
    assert (row.value, row.reason) == (None, "without recall, precision")


def test_missing_replies_are_kept_with_their_reason_and_not_asked_for_again(
    answers: list[EvaluationAnswer], tmp_path: Path
) -> None:
    requests = requests_for(answers, MODEL, NO_BOOKS, first_turns=True)
    replies = [
        completion("75"),
        completion(None, refusal="no"),
        completion("no score"),
        failure(400, "too long"),
        (200, b"{", {}),
    ]
    log = JudgementLog(tmp_path)
    run(FakeJudge(replies), requests, log, concurrency=1)
    found = [(row.value, row.reason.partition(":")[0]) for row in scores(answers, MODEL, NO_BOOKS, True, log)]
    missing = [(None, reason) for reason in ("refused", "malformed", "rejected", "malformed", "no answer")]
    assert found == [(75.0, ""), *missing]
    assert unanswered(requests, log, retry_missing=False) == []
    again = unanswered(requests, log, retry_missing=True)
    assert again == requests[1:]
    run(FakeJudge([completion("60")]), again, log)
    values = [row.value for row in scores(answers, MODEL, NO_BOOKS, True, log)]
    assert values == [75.0, 60.0, 60.0, 60.0, 60.0, None]


@pytest.mark.parametrize("concurrency", [1, 4])
def test_a_run_that_was_stopped_goes_on_and_ends_with_the_scores_of_one_that_was_not(
    answers: list[EvaluationAnswer], tmp_path: Path, concurrency: int
) -> None:
    requests = requests_for(answers, MODEL, NO_BOOKS, first_turns=False)

    def reply(body: dict[str, Any]) -> Answer:
        return completion(str(len(asked(body)) % 100))

    def breaking(body: dict[str, Any]) -> Answer:
        return reply(body) if len(stopped.bodies) < 4 else failure(500, "out of memory")

    stopped, log = FakeJudge(breaking), JudgementLog(tmp_path)
    with pytest.raises(HycoError, match="HTTP 500: out of memory"):
        run(stopped, requests, log, concurrency)
    assert 4 <= len(stopped.bodies) < 4 + concurrency  # nobody begins another call
    rest = unanswered(requests, JudgementLog(tmp_path), retry_missing=False)
    assert len(rest) == len(requests) - 3
    resumed, log = FakeJudge(reply), JudgementLog(tmp_path)
    run(resumed, rest, log, concurrency)
    assert len(resumed.bodies) == len(rest)
    (tmp_path / "whole").mkdir()
    whole = JudgementLog(tmp_path / "whole")
    run(FakeJudge(reply), requests, whole)
    given = (answers, MODEL, NO_BOOKS, False)
    assert scores(*given, log) == scores(*given, whole)


def test_calls_in_flight_are_waited_for_when_another_ends_the_run(
    answers: list[EvaluationAnswer], tmp_path: Path
) -> None:
    requests, log = requests_for(answers, MODEL, NO_BOOKS, first_turns=False), JudgementLog(tmp_path)
    failed = asyncio.Event()
    calls: list[httpx2.Request] = []

    async def handle(request: httpx2.Request) -> httpx2.Response:
        calls.append(request)
        number = len(calls)
        if number == 2:
            await failed.wait()  # the reply comes after the failure
        if number == 3:
            failed.set()
            return httpx2.Response(500, json={"error": {"message": "out of memory"}})
        return httpx2.Response(200, json=completion("75")[1])

    async def call() -> None:
        endpoint = Endpoint(MODEL, LOCAL, retries=0)
        async with JudgeClient(endpoint, httpx2.MockTransport(handle)) as client:
            await judge(requests, client, log, 2, lambda *_: None)

    with pytest.raises(HycoError, match="out of memory"):
        asyncio.run(call())
    assert len(calls) == 3 and len(log.path.read_bytes().splitlines()) == 2


def test_an_answer_that_was_made_again_is_judged_again(tmp_path: Path) -> None:
    log = JudgementLog(tmp_path)
    run(FakeJudge([completion("75")]), requests_for([answer(SYSTEM, "1")], MODEL, NO_BOOKS, False), log)
    other = requests_for([answer(SYSTEM, "1", text="another")], MODEL, NO_BOOKS, False)
    assert unanswered(other, log, retry_missing=False) == other
    assert scores([answer(SYSTEM, "1", text="another")], MODEL, NO_BOOKS, False, log) == []
    assert requests_for([answer(SYSTEM, "1")], "other", NO_BOOKS, False)[0].key != other[0].key


def test_an_endpoint_that_rejects_everything_ends_the_run_and_leaves_no_row(
    answers: list[EvaluationAnswer], tmp_path: Path
) -> None:
    endpoint, log = FakeJudge([failure(400, "no messages here")]), JudgementLog(tmp_path)
    requests = requests_for(answers, MODEL, NO_BOOKS, first_turns=False)
    with pytest.raises(HycoError, match=r"the first 3 requests to the judge got no reply; rejected: HTTP 400: no mess"):
        run(endpoint, requests, log)
    assert len(endpoint.bodies) == 3 and not log.path.exists()


def test_rejected_requests_of_a_judge_that_replied_before_are_missing_scores(
    answers: list[EvaluationAnswer], tmp_path: Path
) -> None:
    requests, log = requests_for(answers, MODEL, NO_BOOKS, first_turns=False), JudgementLog(tmp_path)
    run(FakeJudge([completion("75")]), requests[:1], log)
    run(FakeJudge([failure(400, "context length exceeded")]), requests[1:], log)
    assert unanswered(requests, log, retry_missing=False) == []


def test_one_rejected_request_at_the_beginning_is_a_missing_score(
    answers: list[EvaluationAnswer], tmp_path: Path
) -> None:
    log = JudgementLog(tmp_path)
    requests = requests_for(answers, MODEL, NO_BOOKS, first_turns=False)
    run(FakeJudge([failure(400, "context length exceeded"), completion("75")]), requests, log)
    first = log.find(requests[0].key)
    assert first is not None and first.reason == "rejected: HTTP 400: context length exceeded"


def test_rejected_fields_are_found_once_and_every_row_says_what_was_sent(
    answers: list[EvaluationAnswer], tmp_path: Path
) -> None:
    def reply(body: dict[str, Any]) -> Answer:
        return failure(400, "unknown field", param="seed") if "seed" in body else completion("75")

    endpoint, log = FakeJudge(reply), JudgementLog(tmp_path)
    requests = requests_for(answers, MODEL, NO_BOOKS, first_turns=False)
    run(endpoint, requests, log)
    assert len(endpoint.bodies) == len(requests) + 1
    rows = [log.find(request.key) for request in requests]
    assert all(row and row.request == {"model": MODEL, "temperature": 0.1, "top_p": 0.9} for row in rows)


def test_the_estimate_counts_calls_and_characters(answers: list[EvaluationAnswer], books: Books) -> None:
    requests = requests_for(answers, MODEL, books, first_turns=False)
    characters = sum(len(message["content"]) for request in requests for message in request.messages)
    assert estimate(requests) == Size(9, characters // 4, 6 * 10 + 10 + 500 + 800)
