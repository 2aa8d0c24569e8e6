"""Chat clients against a live server: the `openai` package streams and waits, is refused by name, and goes away."""

import json
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import httpx2 as httpx
import msgspec
import numpy as np
import openai
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from hyco_export.protocol import wire
from hyco_export.protocol.security import Tokens
from hyco_export.server.admission import Facts, Limits
from hyco_export.server.chat.completions import DEFAULT_TOKENS, ChatModel
from hyco_export.server.engine import Engine
from hyco_export.server.http import create_app
from tests.support.live_server import LiveServer, running
from tests.support.scripted import STOP_ID, VOCAB_SIZE, WINDOW, ScriptedSession, ToyLanguageModel
from tests.support.toy_chat import CHAT, LETTERS, NAME, USUAL, Letters
from tests.support.toy_service import ALICE, BOB, INFO

MODEL, ENDLESS = ToyLanguageModel(stop_bias=-1.0), ToyLanguageModel(stop_bias=-99.0)
FACTS = Facts(VOCAB_SIZE, frozenset({STOP_ID}), 2048, "", WINDOW, 4)
LIMITS = Limits(sessions=4, sessions_per_token=2, prompt_limit=100)
PROMPT = "fghi"
LONG = 1  # a seed whose answer is longer than 60 tokens
MESSAGES: Any = [{"role": "user", "content": PROMPT}]


class Held(ScriptedSession):
    """Its rounds wait while the gate is closed; counts them."""

    gate = threading.Event()
    rounds = 0

    def verify(self, root: int, tokens: np.ndarray, parents: np.ndarray) -> np.ndarray:
        Held.rounds += 1
        assert Held.gate.wait(30)
        return super().verify(root, tokens, parents)


def engine_of(session: type[ScriptedSession] = ScriptedSession, model: ToyLanguageModel = MODEL) -> Engine:
    return Engine(lambda: session(model), FACTS, LIMITS)


@pytest.fixture(scope="module")
def engine() -> Engine:
    return engine_of()


@pytest.fixture(scope="module")
def client(engine: Engine) -> Iterator[openai.OpenAI]:
    with running(create_app(engine, INFO, chat=CHAT)) as url:
        yield client_of(url)


def client_of(url: str, token: str = "none") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key=token, max_retries=0, timeout=30)


def ask(client: openai.OpenAI, **changes: Any) -> ChatCompletion:
    reply = client.chat.completions.create(**({"model": NAME, "messages": MESSAGES} | changes))
    assert isinstance(reply, ChatCompletion)
    return reply


def stream(client: openai.OpenAI, **changes: Any) -> list[ChatCompletionChunk]:
    return list(client.chat.completions.create(**({"model": NAME, "messages": MESSAGES} | changes), stream=True))


def said(chunks: list[ChatCompletionChunk]) -> str:
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


def request_bytes(body: bytes) -> bytes:
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def wait_until(holds: Any) -> None:
    end_s = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < end_s
        time.sleep(0.01)


def test_a_whole_answer(client: openai.OpenAI, engine: Engine) -> None:
    ids = MODEL.answer([LETTERS.index(letter) for letter in PROMPT], 40)
    reply = ask(client, temperature=0, max_tokens=40)
    stopped = ids[-1] == STOP_ID
    choice, usage = reply.choices[0], reply.usage
    assert choice.message.content == Letters().decode(ids[:-1] if stopped else ids)
    assert choice.finish_reason == ("stop" if stopped else "length")
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (4, len(ids), 4 + len(ids))
    assert (reply.object, reply.model, len(reply.choices)) == ("chat.completion", NAME, 1)
    assert engine.session_count == 0 and engine.reserved_bytes == 0


def test_a_stream_says_the_same_in_pieces_and_counts_at_the_end(client: openai.OpenAI, engine: Engine) -> None:
    whole = ask(client, seed=LONG, max_tokens=30)
    chunks = stream(client, seed=LONG, max_tokens=30, stream_options={"include_usage": True})
    assert said(chunks) == whole.choices[0].message.content
    *parts, last, totals = chunks
    assert parts[0].choices[0].delta.role == "assistant" and len(parts) > 3
    assert last.choices[0].finish_reason == whole.choices[0].finish_reason
    assert all(part.choices[0].finish_reason is None for part in parts)
    assert not totals.choices and totals.usage is not None and whole.usage is not None
    assert totals.usage.completion_tokens == whole.usage.completion_tokens
    assert len({(chunk.id, chunk.object) for chunk in chunks}) == 1
    assert all(chunk.usage is None for chunk in stream(client, seed=LONG, max_tokens=5))
    wait_until(lambda: engine.session_count == 0)


def test_the_bytes_of_a_stream_are_events_that_end_with_done(client: openai.OpenAI) -> None:
    body = {"model": NAME, "messages": MESSAGES, "stream": True, "max_tokens": 3}
    answer = httpx.post(f"{client.base_url}chat/completions", json=body)
    assert answer.headers["content-type"].startswith("text/event-stream")
    *events, done, rest = answer.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    assert [json.loads(event.removeprefix("data: "))["object"] for event in events] == ["chat.completion.chunk"] * len(
        events
    )


@pytest.mark.parametrize("temperature", [0.0, 1.0, 2.5])
def test_an_answer_is_that_of_a_session_with_the_same_ids_sampling_and_seed(
    client: openai.OpenAI, temperature: float
) -> None:
    prompt = [LETTERS.index(letter) for letter in PROMPT]
    for seed in range(8):
        sampling = wire.Sampling(temperature, 6, 0.9)
        request = wire.PrimeRequest(1, prompt, sampling, wire.EXACT, seed, 25, "server", 4, "")
        peer = engine_of()
        reply = peer.prime(request)
        ids, number, finished = [*prompt, reply.root], 0, reply.finished
        while not finished:
            number += 1
            body = wire.VerifyRequest(1, len(ids), wire.committed_digest(ids), [], [])
            answer = peer.verify(reply.session, number, body)
            ids, finished = [*ids, *answer.tokens], answer.finished
        new = ids[len(prompt) :]
        found = ask(client, seed=seed, max_tokens=25, temperature=temperature, top_p=0.9, extra_body={"top_k": 6})
        assert found.choices[0].message.content == Letters().decode(new[:-1] if finished == "stop" else new)
        assert found.choices[0].finish_reason == finished


def test_without_a_seed_answers_differ(client: openai.OpenAI) -> None:
    texts = {ask(client, max_tokens=20).choices[0].message.content for _ in range(6)}
    assert len(texts) > 1


def test_an_answer_ends_before_a_stop_string(client: openai.OpenAI) -> None:
    whole = ask(client, seed=LONG, max_tokens=30).choices[0].message.content
    assert whole is not None and len(whole) > 8
    stop = whole[5:7]
    expected = whole[: whole.index(stop)]
    for found in (
        ask(client, seed=LONG, max_tokens=30, stop=stop),
        ask(client, seed=LONG, max_tokens=30, stop=["!", stop]),
    ):
        assert found.choices[0].message.content == expected
        assert found.choices[0].finish_reason == "stop"
    chunks = stream(client, seed=LONG, max_tokens=30, stop=[stop])
    assert said(chunks) == expected and chunks[-1].choices[0].finish_reason == "stop"


def test_what_the_caller_leaves_open_is_the_recipes_sampling_and_a_cap(client: openai.OpenAI) -> None:
    asked = {"temperature": USUAL.temperature, "top_p": USUAL.top_p, "extra_body": {"top_k": USUAL.top_k}}
    assert (
        ask(client, seed=1).choices[0].message.content
        == ask(client, seed=1, max_tokens=DEFAULT_TOKENS, **asked).choices[0].message.content
    )


@pytest.mark.parametrize(
    ("changes", "parameter", "code"),
    [
        ({"n": 2}, "n", "unsupported"),
        ({"messages": [{"role": "user", "content": "!"}]}, "messages", "unsupported"),
        ({"messages": [{"role": "user", "content": "f" * 101}]}, "messages", "prompt_size"),
        ({"max_tokens": 2045}, "max_tokens", "value_range"),
        ({"max_completion_tokens": 2045}, "max_completion_tokens", "value_range"),
        ({"temperature": 0.001}, "temperature", "value_range"),
        ({"stop": [""]}, "stop[0]", "value_range"),
        ({"messages": [{"role": "user", "content": "f"}, {"role": "tool"}]}, "messages[1].role", "unsupported"),
    ],
)
@pytest.mark.parametrize("streams", [False, True])
def test_refusals_have_openais_form(
    client: openai.OpenAI, engine: Engine, changes: Any, parameter: str, code: str, streams: bool
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        (stream if streams else ask)(client, **changes)
    assert (refused.value.param, refused.value.code, refused.value.type) == (parameter, code, "invalid_request_error")
    assert engine.session_count == 0


def test_the_one_model_is_listed_and_no_other_is_found(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list().data] == [NAME]
    assert client.models.retrieve(NAME).owned_by == "hyco-export"
    for call in (lambda: client.models.retrieve("gpt"), lambda: ask(client, model="gpt")):
        with pytest.raises(openai.NotFoundError) as refused:
            call()
        assert refused.value.code == "model_not_found" and NAME in refused.value.message


def test_bodies_that_are_no_call_are_refused_before_anything_is_opened(client: openai.OpenAI) -> None:
    url = f"{client.base_url}chat/completions"
    kind = {"Content-Type": "application/json"}
    cases = [
        (httpx.post(url, content=b"{}"), 415, "media_type"),
        (httpx.post(url, content=b"[]", headers=kind), 400, "malformed"),
        (httpx.post(url, content=b" " * 10_000, headers=kind), 413, "body_size"),
        (httpx.post(url, json={}, headers={"Origin": "https://page.example"}), 403, "origin"),
    ]
    for answer, status, code in cases:
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["param"]) == (status, code, None)


def test_a_verifier_without_a_template_says_so() -> None:
    silent = ChatModel(NAME, None, USUAL, "its tokenizer has no chat template")
    with running(create_app(engine_of(), INFO, chat=silent)) as url:
        with pytest.raises(openai.BadRequestError, match="no chat template") as refused:
            ask(client_of(url))
        assert refused.value.param == "messages"
        assert [model.id for model in client_of(url).models.list().data] == [NAME]


def test_a_server_without_a_chat_model_has_no_such_call() -> None:
    with running(create_app(engine_of(), INFO)) as url:
        assert httpx.post(f"{url}/v1/chat/completions", json={}).status_code == 404


def test_only_who_shows_a_token_is_answered_and_each_has_its_share() -> None:
    engine = engine_of()
    with running(create_app(engine, INFO, Tokens([ALICE, BOB]), chat=CHAT)) as url:
        with pytest.raises(openai.AuthenticationError) as refused:
            ask(client_of(url, "nobody-0123456789abcdef"))
        assert refused.value.code == "unauthorized"
        alice = httpx.Client(headers={"Authorization": f"Bearer {ALICE}", "Content-Type": wire.MEDIA_TYPE})
        request = wire.PrimeRequest(1, [5], USUAL, wire.EXACT, 1, 50, "device", 0, "")
        opened = [alice.post(f"{url}/v1/sessions", content=wire.encode(request)) for _ in range(2)]
        assert {answer.status_code for answer in opened} == {200}
        with pytest.raises(openai.RateLimitError) as full:
            ask(client_of(url, ALICE))
        assert full.value.code == "sessions_full" and int(full.value.response.headers["retry-after"]) >= 1
        assert ask(client_of(url, BOB), max_tokens=3).usage is not None
        assert engine.session_count == 2


@pytest.mark.parametrize("streams", [False, True])
def test_a_client_that_goes_away_ends_its_generation(streams: bool) -> None:
    Held.gate.clear()
    Held.rounds = 0
    engine = engine_of(Held, ENDLESS)
    with running(create_app(engine, INFO, chat=CHAT)) as url:
        body = {"model": NAME, "messages": MESSAGES, "stream": streams, "max_tokens": 2_000}
        with closing(socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])))) as peer:
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # closing resets it
            peer.sendall(request_bytes(msgspec.json.encode(body)))
            if streams:
                assert peer.recv(12) == b"HTTP/1.1 200"
            wait_until(lambda: Held.rounds == 1)
        Held.gate.set()
        wait_until(lambda: engine.session_count == 0 and engine.reserved_bytes == 0)
        assert Held.rounds < 200  # of more than 400


def test_a_failure_in_the_middle_of_a_stream_is_its_last_event() -> None:
    class Failing(ScriptedSession):
        def verify(self, root: int, tokens: np.ndarray, parents: np.ndarray) -> np.ndarray:
            if len(self.ids) > 10:
                raise RuntimeError("no more")
            return super().verify(root, tokens, parents)

    engine = engine_of(Failing)
    with running(create_app(engine, INFO, chat=CHAT)) as url:
        seen: list[ChatCompletionChunk] = []
        with pytest.raises(openai.APIError) as failed:
            for chunk in client_of(url).chat.completions.create(
                model=NAME, messages=MESSAGES, seed=LONG, max_tokens=60, stream=True
            ):
                seen.append(chunk)
        assert failed.value.code == "model_fault" and said(seen)
        assert "no more" not in failed.value.message and failed.value.message.endswith("(send the call again)")
        with pytest.raises(openai.InternalServerError) as whole:
            ask(client_of(url), seed=LONG, max_tokens=60)
        assert whole.value.code == "model_fault"
        wait_until(lambda: engine.session_count == 0)


def test_a_server_that_stops_ends_answers_with_the_reason() -> None:
    Held.gate.clear()
    Held.rounds = 0
    engine = engine_of(Held, ENDLESS)
    server = LiveServer(lambda: create_app(engine, INFO, chat=CHAT))
    failures: list[openai.APIError] = []

    def call(asked: Any) -> None:
        with pytest.raises(openai.APIError) as failed:
            asked(client_of(server.url), max_tokens=2_000)
        failures.append(failed.value)

    callers = [threading.Thread(target=call, args=(asked,)) for asked in (ask, stream)]
    for caller in callers:
        caller.start()
    wait_until(lambda: engine.session_count == 2 and Held.rounds == 1)
    stopping = threading.Thread(target=server.stop)
    stopping.start()
    wait_until(lambda: server._server.should_exit)
    Held.gate.set()
    for thread in (*callers, stopping):
        thread.join(30)
    assert [failure.code for failure in failures] == ["shutting_down"] * 2
    assert not server.running


def test_what_was_said_is_counted_and_nothing_of_it_is_shown() -> None:
    with running(create_app(engine_of(), INFO, chat=CHAT)) as url:
        reply = ask(client_of(url), seed=LONG, max_tokens=30)
        stream(client_of(url), seed=LONG, max_tokens=30)
        text = httpx.get(f"{url}/metrics").text
    assert reply.usage is not None
    assert 'hyco_requests_total{call="chat"} 2.0' in text
    assert f"hyco_committed_tokens_total {2.0 * reply.usage.completion_tokens}" in text
    assert PROMPT not in text and str(reply.choices[0].message.content) not in text
