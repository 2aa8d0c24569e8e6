"""Sessions belong to who opened them: another caller cannot use, end, count or even see them."""

import threading
import time
from collections.abc import Callable, Iterator

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.testclient import TestClient

from hyco_export.errors import ProtocolError
from hyco_export.protocol import wire
from hyco_export.protocol.security import Tokens
from hyco_export.server.admission import Limits
from hyco_export.server.engine import Engine
from hyco_export.server.http import create_app
from tests.support.scripted import ScriptedSession
from tests.support.toy_service import (
    ALICE,
    BOB,
    FACTS,
    INFO,
    LIMITS,
    MODEL,
    PRIME,
    PROMPT,
    bearer,
    first_round,
)


def share(sessions: int) -> Limits:
    return msgspec.structs.replace(LIMITS, sessions_per_token=sessions)


def engine_for(sessions: int, open_session: Callable[[], ScriptedSession] = lambda: ScriptedSession(MODEL)) -> Engine:
    """An engine that gives so many sessions to one owner."""
    return Engine(open_session, FACTS, share(sessions))


@pytest.fixture
def engine() -> Engine:
    return engine_for(2)


@pytest.fixture
def client(engine: Engine) -> Iterator[TestClient]:
    with TestClient(
        create_app(engine, INFO, Tokens([ALICE, BOB])), headers={"Content-Type": wire.MEDIA_TYPE}
    ) as client:
        yield client


def opened(client: TestClient, token: str) -> wire.PrimeReply:
    answer = client.post("/v1/sessions", content=wire.encode(PRIME), headers=bearer(token))
    assert answer.status_code == 200
    return wire.decode(answer.content, wire.PrimeReply)


def test_every_call_wants_a_token_but_the_probes(client: TestClient) -> None:
    for method, path in (
        ("GET", "/v1/info"),
        ("GET", "/metrics"),
        ("POST", "/v1/sessions"),
        ("POST", "/v1/sessions/x/rounds/1"),
        ("DELETE", "/v1/sessions/x"),
    ):
        for headers in ({}, bearer(ALICE + "x")):
            answer = client.request(method, path, content=wire.encode(PRIME), headers=headers)
            assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer"), path
            assert wire.decode(answer.content, wire.Refusal).code == "unauthorized"
    assert client.get("/healthz").status_code == client.get("/readyz").status_code == 200
    assert client.get("/v1/info", headers=bearer(BOB)).status_code == 200


def test_a_foreign_session_answers_exactly_like_one_that_never_was(client: TestClient, engine: Engine) -> None:
    reply = opened(client, ALICE)
    body = first_round(reply)
    foreign = client.post(f"/v1/sessions/{reply.session}/rounds/1", content=body, headers=bearer(BOB))
    never = client.post(f"/v1/sessions/{'A' * len(reply.session)}/rounds/1", content=body, headers=bearer(BOB))
    assert (foreign.status_code, foreign.content) == (never.status_code, never.content)
    assert wire.decode(foreign.content, wire.Refusal).code == wire.UNKNOWN_SESSION
    assert {**foreign.headers} == {**never.headers}
    assert client.delete(f"/v1/sessions/{reply.session}", headers=bearer(BOB)).status_code == 204
    assert engine.session_count == 1  # Bob ended nothing
    mine = client.post(f"/v1/sessions/{reply.session}/rounds/1", content=body, headers=bearer(ALICE))
    assert wire.decode(mine.content, wire.VerifyReply).round == 1
    assert client.delete(f"/v1/sessions/{reply.session}", headers=bearer(ALICE)).status_code == 204
    assert engine.session_count == 0


def test_a_token_gets_its_sessions_and_no_more(client: TestClient) -> None:
    first = opened(client, ALICE)
    opened(client, ALICE)
    refusal = client.post("/v1/sessions", content=wire.encode(PRIME), headers=bearer(ALICE))
    assert refusal.status_code == 429
    assert wire.decode(refusal.content, wire.Refusal).message == (
        "this caller holds 2 sessions, at most 2 are given to one"
    )
    opened(client, BOB)
    client.delete(f"/v1/sessions/{first.session}", headers=bearer(ALICE))
    opened(client, ALICE)


class Slow(ScriptedSession):
    """Waits in its prefill until the test lets it go."""

    def __init__(self, entered: threading.Event, release: threading.Event) -> None:
        super().__init__(MODEL)
        self._entered, self._release = entered, release

    def prime(self, ids: np.ndarray) -> np.ndarray:
        self._entered.set()
        assert self._release.wait(timeout=30)
        return super().prime(ids)


def wait_for_sessions(engine: Engine, count: int) -> None:
    deadline_s = time.monotonic() + 30
    while engine.session_count < count:
        assert time.monotonic() < deadline_s
        time.sleep(0.001)


def test_primes_in_flight_are_counted() -> None:
    entered, release = threading.Event(), threading.Event()
    engine = engine_for(2, lambda: Slow(entered, release))
    threads = [threading.Thread(target=engine.prime, args=(PRIME, None, "alice")) for _ in range(2)]
    for thread in threads:
        thread.start()
    assert entered.wait(timeout=30)
    wait_for_sessions(engine, 2)  # one in its pass, one in the queue
    with pytest.raises(ProtocolError, match="holds 2 sessions"):
        engine.prime(PRIME, owner="alice")
    release.set()
    for thread in threads:
        thread.join(timeout=30)
    with pytest.raises(ProtocolError, match="holds 2 sessions"):
        engine.prime(PRIME, owner="alice")


def test_sessions_that_the_engine_lost_are_not_held_against_their_owner() -> None:
    now_s = [0.0]

    class Faulty(ScriptedSession):
        def verify(self, root: int, tokens: np.ndarray, parents: np.ndarray) -> None:  # type: ignore[override]
            raise RuntimeError("broken")

    engine = Engine(lambda: Faulty(MODEL), FACTS, share(1), now=lambda: now_s[0])
    reply = engine.prime(PRIME, owner="alice")
    message = wire.decode(first_round(reply), wire.VerifyRequest)
    with pytest.raises(ProtocolError, match="the model failed"):
        engine.verify(reply.session, 1, message, owner="alice")
    engine.prime(PRIME, owner="alice")
    now_s[0] += LIMITS.idle_s + 1.0
    lost = engine.prime(PRIME, owner="alice")
    engine.close(lost.session, "alice")
    with pytest.raises(ProtocolError) as refusal:
        engine.verify(lost.session, 1, message, owner="alice")
    assert refusal.value.code == wire.UNKNOWN_SESSION
    engine.prime(PRIME, owner="alice")


def test_a_prime_sent_again_replaces_its_first_try_and_no_other_session() -> None:
    engine = engine_for(8)
    tried = msgspec.structs.replace(PRIME, attempt="a")
    first = engine.prime(tried, owner="alice")
    others = [engine.prime(tried, owner="bob")]
    others += [engine.prime(msgspec.structs.replace(PRIME, attempt="b"), owner="alice")]
    others += [engine.prime(PRIME, owner="alice") for _ in range(2)]  # without a name they are calls of their own
    again = engine.prime(tried, owner="alice")
    assert again.root == first.root and again.session != first.session
    assert engine.session_count == len(others) + 1
    message = wire.decode(first_round(first), wire.VerifyRequest)
    with pytest.raises(ProtocolError) as refusal:
        engine.verify(first.session, 1, message, owner="alice")
    assert refusal.value.code == wire.UNKNOWN_SESSION
    assert engine.verify(again.session, 1, message, owner="alice").round == 1
    anybody = [engine.prime(tried) for _ in range(2)]  # without tokens: equal attempts of two clients are one
    with pytest.raises(ProtocolError):
        engine.verify(anybody[0].session, 1, message)
    with pytest.raises(ProtocolError, match="attempt has 65 characters, at most 64"):
        engine.prime(msgspec.structs.replace(PRIME, attempt="x" * 65), owner="alice")


@pytest.mark.parametrize("queued", [False, True])
def test_a_try_that_is_overtaken_by_the_next_one_leaves_no_session(queued: bool) -> None:
    entered, release = threading.Event(), threading.Event()
    opened: list[ScriptedSession] = []

    def open_session() -> ScriptedSession:
        held_up = not opened  # the first one's pass
        opened.append(Slow(entered, release) if held_up else ScriptedSession(MODEL))
        return opened[-1]

    engine, tried = engine_for(8, open_session), msgspec.structs.replace(PRIME, attempt="a")
    refusals: list[ProtocolError] = []
    replies: list[wire.PrimeReply] = []

    def call(request: wire.PrimeRequest, owner: str) -> None:
        try:
            replies.append(engine.prime(request, owner=owner))
        except ProtocolError as refusal:
            refusals.append(refusal)

    calls = [("bob", PRIME), ("alice", tried), ("alice", tried)][not queued :]
    threads = [threading.Thread(target=call, args=(request, owner)) for owner, request in calls]
    for count, thread in enumerate(threads, 1):
        thread.start()
        assert entered.wait(timeout=30)  # the first one is in its pass
        wait_for_sessions(engine, count)
    release.set()
    for thread in threads:
        thread.join(timeout=30)
    message = "went away before its turn" if queued else "the same attempt was sent again meanwhile"
    assert [refusal.code for refusal in refusals] == ["cancelled"] and message in refusals[0].message
    assert engine.held() == {reply.session for reply in replies} and len(replies) == len(calls) - 1


def test_finished_sessions_make_room_and_running_ones_do_not() -> None:
    engine = engine_for(2)
    short = msgspec.structs.replace(PRIME, max_new_tokens=1)
    running, ended = engine.prime(PRIME, owner="alice"), [engine.prime(short, owner="alice")]
    for _ in range(3 * LIMITS.sessions):  # each takes the place of the one before
        ended.append(engine.prime(short, owner="alice"))
        assert set(engine.held()) == {running.session, ended[-1].session}
    message = wire.decode(first_round(running), wire.VerifyRequest)
    with pytest.raises(ProtocolError) as refusal:
        engine.verify(ended[0].session, 1, message, owner="alice")
    assert refusal.value.code == wire.UNKNOWN_SESSION
    engine.prime(PRIME, owner="alice")
    with pytest.raises(ProtocolError, match="holds 2 sessions") as refusal:
        engine.prime(short, owner="alice")
    assert refusal.value.hint.endswith(f"in {LIMITS.idle_s:.0f} s the longest idle one expires")
    assert engine.verify(running.session, 1, message, owner="alice").round == 1


def test_what_the_engine_evicts_is_not_held_against_its_owner() -> None:
    engine, short = engine_for(1), msgspec.structs.replace(PRIME, max_new_tokens=1)
    first = engine.prime(short, owner="alice")
    others = [engine.prime(short) for _ in range(LIMITS.sessions)]
    assert set(engine.held()) == {reply.session for reply in others}  # alice's was the oldest
    again = engine.prime(PRIME, owner="alice")
    assert again.session != first.session and others[0].session not in engine.held()


def test_callers_whom_nobody_tells_apart_have_the_engines_limit_only() -> None:
    engine = engine_for(1)
    for _ in range(LIMITS.sessions):
        engine.prime(PRIME)
    with pytest.raises(ProtocolError, match=f"all {LIMITS.sessions} sessions are in use") as refusal:
        engine.prime(PRIME)
    assert refusal.value.hint == (
        f"close a session or try again when one has ended; in {LIMITS.idle_s:.0f} s the longest idle one expires"
    )


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["a", "b"]), st.sampled_from(["a", "b"])), max_size=20))
def test_random_histories_of_two_owners_never_mix(steps: list[tuple[str, str]]) -> None:
    """(who calls, whose session): a round is answered exactly when the two are one, and goes on where it was."""
    engine = engine_for(1)
    replies = {
        owner: engine.prime(msgspec.structs.replace(PRIME, prompt=[*PROMPT, 2]), owner=owner) for owner in ("a", "b")
    }
    ids = {owner: [*PROMPT, 2, reply.root] for owner, reply in replies.items()}
    rounds = dict.fromkeys(replies, 0)
    for caller, owner in steps:
        known = ids[owner]
        message = wire.VerifyRequest(wire.PROTOCOL_VERSION, len(known), wire.committed_digest(known), [], [])
        if caller != owner:
            with pytest.raises(ProtocolError) as refusal:
                engine.verify(replies[owner].session, rounds[owner] + 1, message, owner=caller)
            assert refusal.value.code == wire.UNKNOWN_SESSION
            continue
        rounds[owner] += 1
        ids[owner] += engine.verify(replies[owner].session, rounds[owner], message, owner=owner).tokens
        assert ids[owner][len(PROMPT) + 1 :] == MODEL.greedy([*PROMPT, 2], rounds[owner] + 1)
