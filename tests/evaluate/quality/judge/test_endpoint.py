"""One call of an endpoint: fields that it rejects, refusals, waiting, broken replies, and where the key may go."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import httpx2
import pytest

from hyco_export.errors import HycoError
from hyco_export.evaluate.quality.judge.endpoint import SAMPLING, Endpoint, JudgeClient, Reply, read_key
from tests.support.fake_judge import MODEL, Answer, FakeJudge, completion, failure

LOCAL = "http://127.0.0.1:8000/v1"
KEY = "sk-secret-0123456789"
MESSAGES = ({"role": "user", "content": "how good?"},)


@pytest.fixture(autouse=True)
def no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds that the client would have slept."""
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    monkeypatch.setattr("openai._base_client.anyio.sleep", sleep)
    return slept


def ask(judge: FakeJudge, times: int = 1, **options: Any) -> list[Reply]:
    """The replies to so many calls of one client."""

    async def call() -> list[Reply]:
        async with JudgeClient(Endpoint(MODEL, LOCAL, **options), judge.transport) as client:
            return [await client.ask(MESSAGES) for _ in range(times)]

    return asyncio.run(call())


def test_a_reply_is_kept_with_what_was_sent_and_what_it_took() -> None:
    judge = FakeJudge([completion('{"score": 80}')])
    (reply,) = ask(judge)
    assert judge.bodies == [{"model": MODEL, "messages": [*MESSAGES], "temperature": 0.1, "top_p": 0.9, "seed": 42}]
    sent = {"model": MODEL, **SAMPLING}
    assert reply == Reply('{"score": 80}', finish="stop", tokens_in=100, tokens_out=7, attempts=1, request=sent)


def rejecting(*names: str) -> Callable[[dict[str, Any]], Answer]:
    """An endpoint that takes none of these fields, and names one at a time: the second kind only in its text."""

    def answer(body: dict[str, Any]) -> Answer:
        for name in names:
            if name in body:
                told = {"param": name} if name == "temperature" else {}
                return failure(400, f"Unsupported parameter: '{name}' is not supported with this model.", **told)
        return completion("70")

    return answer


def test_fields_that_are_rejected_are_left_out_one_by_one_and_not_sent_again() -> None:
    judge = FakeJudge(rejecting("temperature", "seed"))
    first, second = ask(judge, times=2)
    sent = [[name for name in SAMPLING if name in body] for body in judge.bodies]
    assert sent == [["temperature", "top_p", "seed"], ["top_p", "seed"], ["top_p"], ["top_p"]]
    assert first.request == second.request == {"model": MODEL, "top_p": 0.9}


def test_a_field_that_was_not_the_reason_is_sent_again() -> None:
    """A request whose text happens to name a field, and which is rejected without it too."""

    def answer(body: dict[str, Any]) -> Answer:
        first = len(judge.bodies) <= 2
        return failure(400, "cannot parse the seed of this prompt") if first else completion("70")

    judge = FakeJudge(answer)
    rejected, taken = ask(judge, times=2)
    assert rejected.rejected and rejected.problem == "rejected: HTTP 400: cannot parse the seed of this prompt"
    assert taken.request == {"model": MODEL, **SAMPLING}


@pytest.mark.parametrize(
    ("answer", "problem", "text"),
    [
        (completion(None, refusal="I will not."), "refused: by the judge", "I will not."),
        (completion("", "content_filter"), "refused: by the endpoint's filter", ""),
        (failure(400, "blocked", code="content_filter"), "refused: by the endpoint's filter", "blocked"),
        (completion(""), "malformed: an empty reply (finish reason stop)", ""),
        ((200, {"choices": []}, {}), "malformed: no chat completion: list index out of range", '{"choices": []}'),
        ((200, b'{"choices": [{"mess', {}), "malformed: no chat completion: Input data was truncated", None),
        ((200, b"<html>", {"content-type": "text/html"}), "malformed: no chat completion: JSON is malformed", None),
        ((200, {"error": "busy"}, {}), "malformed: no chat completion: Object missing required field `choices`", None),
    ],
)
def test_replies_without_a_score_say_why(answer: Answer, problem: str, text: str | None) -> None:
    (reply,) = ask(FakeJudge([answer]))
    assert reply.problem.startswith(problem) and not reply.rejected
    assert text is None or reply.text == text


def test_retry_after_is_waited_for(waits: list[float]) -> None:
    limited = failure(429, "slow down", {"retry-after": "17"})
    (reply,) = ask(FakeJudge([limited, limited, completion("70")]))
    assert waits == [17.0, 17.0]
    assert reply.attempts == 3 and reply.text == "70"


@pytest.mark.parametrize(
    ("answer", "message", "hint"),
    [
        (
            failure(401, f"Incorrect API key: {KEY[:9]}***"),
            "does not accept a call without a key",
            "put a valid key in",
        ),
        (
            failure(404, "no such model"),
            "has no model 'fake-judge', or no chat completions (HTTP 404)",
            "the judge's model or URL",
        ),
        (failure(429, "quota"), "takes no further calls (HTTP 429), after 1 retries: quota", "lower --concurrency"),
        (failure(503, "overloaded"), "answers with HTTP 503: overloaded", "run the command again"),
    ],
)
def test_what_holds_for_every_call_ends_the_run(answer: Answer, message: str, hint: str, waits: list[float]) -> None:
    judge = FakeJudge([answer])
    with pytest.raises(HycoError) as caught:
        ask(judge, retries=1)
    again = 1 if answer[0] in (429, 503) else 0
    assert len(judge.bodies) == 1 + again == 1 + len(waits)
    assert message in caught.value.message and hint in caught.value.hint
    assert "\n" not in str(caught.value) and "sk-" not in str(caught.value)


def failing(error: Callable[[httpx2.Request], Exception]) -> httpx2.AsyncBaseTransport:
    async def handle(request: httpx2.Request) -> httpx2.Response:
        raise error(request)

    return httpx2.MockTransport(handle)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (lambda sent: httpx2.ReadTimeout("slow", request=sent), "did not answer within 9 s, 3 times"),
        (lambda sent: httpx2.ConnectError("connection refused", request=sent), "cannot be reached: connection refused"),
    ],
)
def test_an_endpoint_that_does_not_answer_is_named(
    error: Callable[[httpx2.Request], Exception], message: str, waits: list[float]
) -> None:
    def failed(sent: httpx2.Request) -> Exception:
        assert sent.extensions["timeout"]["read"] == 9.0
        return error(sent)

    async def call() -> None:
        endpoint = Endpoint(MODEL, "http://127.0.0.1:8000/v1?tenant=secret", timeout_s=9.0, retries=2)
        async with JudgeClient(endpoint, failing(failed)) as client:
            await client.ask(MESSAGES)

    with pytest.raises(HycoError, match=message) as caught:
        asyncio.run(call())
    assert len(waits) == 2 and "secret" not in str(caught.value)


def test_the_key_is_sent_and_struck_out_of_what_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", f"{KEY}\n")
    judge = FakeJudge([completion(f"your key is {KEY}"), failure(400, f"odd key {KEY}")])
    echoed, rejected = ask(judge, times=2, key_variable="JUDGE_KEY")
    assert judge.headers[0]["authorization"] == f"Bearer {KEY}"
    assert echoed.text == "your key is [key]" and rejected.problem == "rejected: HTTP 400: odd key [key]"


REFUSED_PLACES: Sequence[tuple[Endpoint, str | None, str]] = (
    (Endpoint(MODEL), None, "no key in the environment variable OPENAI_API_KEY"),
    (Endpoint(MODEL, LOCAL, "JUDGE_KEY"), None, "no key in the environment variable JUDGE_KEY"),
    (Endpoint(MODEL, "http://judge.example/v1"), KEY, "would go to judge.example without TLS"),
    (Endpoint(MODEL, "ftp://user:word@judge.example"), KEY, "the judge's URL 'ftp://judge.example' is no http"),
    (Endpoint(MODEL, "judge"), KEY, "the judge's URL 'judge' is no http"),
)


@pytest.mark.parametrize(("endpoint", "key", "message"), REFUSED_PLACES)
def test_a_key_that_is_missing_or_would_travel_in_the_clear_is_refused(
    endpoint: Endpoint, key: str | None, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if key:
        monkeypatch.setenv("OPENAI_API_KEY", key)
    with pytest.raises(HycoError) as caught:
        read_key(endpoint)
    assert message in caught.value.message and caught.value.hint
    assert KEY not in str(caught.value) and "word" not in str(caught.value)


def test_servers_that_want_no_key_get_none(monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_key(Endpoint(MODEL, LOCAL)) == "" and read_key(Endpoint(MODEL, "http://judge.example/v1")) == ""
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    assert read_key(Endpoint(MODEL, LOCAL)) == read_key(Endpoint(MODEL, "http://judge.example", insecure=True)) == KEY


@pytest.mark.parametrize("model", ["", " "])
def test_a_model_without_a_name_is_refused(model: str) -> None:
    with pytest.raises(HycoError, match=f"model is '{model}'") as caught:
        Endpoint(model)
    assert caught.value.hint == "give its name, as the endpoint calls it"
