"""Sessions belong to who opened them: another caller cannot use, end, count or even see them."""

import threading
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.testclient import TestClient

from hyco_export.errors import ProtocolError
from hyco_export.protocol import wire
from hyco_export.protocol.security import ANYBODY, Tokens
from hyco_export.server.access import SessionAccess
from hyco_export.server.engine import Engine
from hyco_export.server.http import CallLimits, create_app
from hyco_export.server.interfaces import Gone, Held, never_gone
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
    toy_engine,
)

CALLS = CallLimits(sessions=2)


@pytest.fixture
def engine() -> Engine:
    return toy_engine()


@pytest.fixture
def client(engine: Engine) -> Iterator[TestClient]:
    with TestClient(
        create_app(engine, INFO, Tokens([ALICE, BOB]), CALLS), headers={"Content-Type": wire.MEDIA_TYPE}
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


def test_primes_in_flight_are_counted() -> None:
    entered, release = threading.Barrier(3), threading.Event()

    class Slow(ScriptedSession):
        def prime(self, ids: np.ndarray) -> np.ndarray:
            entered.wait(timeout=30)
            assert release.wait(timeout=30)
            return super().prime(ids)

    class Unlocked:  # an engine that takes calls side by side
        def prime(self, request: wire.PrimeRequest, gone: Gone = never_gone) -> wire.PrimeReply:
            Slow(MODEL).prime(np.asarray(request.prompt))
            return wire.PrimeReply(1, threading.current_thread().name, 3, 5, "", None, 1.0)

        def verify(
            self, session_id: str, round_number: int, request: wire.VerifyRequest, gone: Gone = never_gone
        ) -> wire.VerifyReply:
            raise AssertionError

        def close(self, session_id: str) -> None:
            raise AssertionError

        def held(self) -> dict[str, Held]:
            return {thread.name: Held(None, spare=False) for thread in threads}

    access = SessionAccess(Unlocked(), 2)
    threads = [threading.Thread(target=access.prime, args=("alice", PRIME)) for _ in range(2)]
    for thread in threads:
        thread.start()
    entered.wait(timeout=30)
    with pytest.raises(ProtocolError, match="holds 2 sessions"):
        access.prime("alice", PRIME)
    release.set()
    for thread in threads:
        thread.join(timeout=30)
    with pytest.raises(ProtocolError, match="holds 2 sessions"):
        access.prime("alice", PRIME)


def test_sessions_that_the_engine_lost_are_not_held_against_their_owner() -> None:
    now_s = [0.0]

    class Faulty(ScriptedSession):
        def verify(self, root: int, tokens: np.ndarray, parents: np.ndarray) -> None:  # type: ignore[override]
            raise RuntimeError("broken")

    engine = Engine(lambda: Faulty(MODEL), FACTS, LIMITS, now=lambda: now_s[0])
    access = SessionAccess(engine, 1)
    reply = access.prime("alice", PRIME)
    message = wire.decode(first_round(reply), wire.VerifyRequest)
    with pytest.raises(ProtocolError, match="the model failed"):
        access.verify("alice", reply.session, 1, message)
    access.prime("alice", PRIME)
    now_s[0] += LIMITS.idle_s + 1.0
    lost = access.prime("alice", PRIME)
    engine.close(lost.session)
    with pytest.raises(ProtocolError) as refusal:
        access.verify("alice", lost.session, 1, message)
    assert refusal.value.code == wire.UNKNOWN_SESSION
    access.prime("alice", PRIME)


def test_a_prime_sent_again_replaces_its_first_try_and_no_other_session(engine: Engine) -> None:
    access = SessionAccess(engine, 8)
    tried = msgspec.structs.replace(PRIME, attempt="a")
    first = access.prime("alice", tried)
    others = [access.prime("bob", tried), access.prime("alice", msgspec.structs.replace(PRIME, attempt="b"))]
    others += [access.prime("alice", PRIME), access.prime("alice", PRIME)]  # without a name they are calls of their own
    again = access.prime("alice", tried)
    assert again.root == first.root and again.session != first.session
    assert engine.session_count == len(others) + 1
    message = wire.decode(first_round(first), wire.VerifyRequest)
    with pytest.raises(ProtocolError) as refusal:
        access.verify("alice", first.session, 1, message)
    assert refusal.value.code == wire.UNKNOWN_SESSION
    assert access.verify("alice", again.session, 1, message).round == 1
    anybody = [access.prime("", tried) for _ in range(2)]  # without tokens: equal attempts of two clients are one
    with pytest.raises(ProtocolError):
        access.verify("", anybody[0].session, 1, message)
    with pytest.raises(ProtocolError, match="attempt has 65 characters, at most 64"):
        access.prime("alice", msgspec.structs.replace(PRIME, attempt="x" * 65))


def test_a_try_that_is_overtaken_by_the_next_one_leaves_no_session(engine: Engine) -> None:
    entered, release = threading.Event(), threading.Event()

    class Overtaken:
        """The engine, whose first PRIME is held up after it was answered: its reply is lost on the way."""

        verify, close, held = engine.verify, engine.close, engine.held

        def prime(self, request: wire.PrimeRequest, gone: Gone = never_gone) -> wire.PrimeReply:
            reply = engine.prime(request)
            if not entered.is_set():
                entered.set()
                assert release.wait(timeout=30)
                assert gone()
            return reply

    access, tried = SessionAccess(Overtaken(), 8), msgspec.structs.replace(PRIME, attempt="a")
    refusals: list[ProtocolError] = []

    def first_try() -> None:
        with pytest.raises(ProtocolError) as refusal:
            access.prime("alice", tried)
        refusals.append(refusal.value)

    first = threading.Thread(target=first_try)
    first.start()
    assert entered.wait(timeout=30)
    again = access.prime("alice", tried)
    release.set()
    first.join(timeout=30)
    assert [refusal.code for refusal in refusals] == ["cancelled"]
    assert set(engine.held()) == {again.session}


def test_finished_sessions_make_room_and_running_ones_do_not(engine: Engine) -> None:
    access = SessionAccess(engine, 2)
    short = msgspec.structs.replace(PRIME, max_new_tokens=1)
    running, ended = access.prime("alice", PRIME), [access.prime("alice", short)]
    for _ in range(3 * LIMITS.sessions):  # each takes the place of the one before
        ended.append(access.prime("alice", short))
        assert set(engine.held()) == {running.session, ended[-1].session}
    message = wire.decode(first_round(running), wire.VerifyRequest)
    with pytest.raises(ProtocolError) as refusal:
        access.verify("alice", ended[0].session, 1, message)
    assert refusal.value.code == wire.UNKNOWN_SESSION
    access.prime("alice", PRIME)
    with pytest.raises(ProtocolError, match="holds 2 sessions") as refusal:
        access.prime("alice", short)
    assert refusal.value.hint.endswith(f"in {LIMITS.idle_s:.0f} s the longest idle one expires")
    assert access.verify("alice", running.session, 1, message).round == 1


def test_what_the_engine_evicts_is_not_held_against_its_owner(engine: Engine) -> None:
    access, short = SessionAccess(engine, 1), msgspec.structs.replace(PRIME, max_new_tokens=1)
    first = access.prime("alice", short)
    others = [access.prime(ANYBODY, short) for _ in range(LIMITS.sessions)]
    assert set(engine.held()) == {reply.session for reply in others}  # alice's was the oldest
    again = access.prime("alice", PRIME)
    assert again.session != first.session and others[0].session not in engine.held()


def test_callers_whom_nobody_tells_apart_have_the_engines_limit_only() -> None:
    access = SessionAccess(toy_engine(), 1)
    for _ in range(LIMITS.sessions):
        access.prime(ANYBODY, PRIME)
    with pytest.raises(ProtocolError, match=f"all {LIMITS.sessions} sessions are in use") as refusal:
        access.prime(ANYBODY, PRIME)
    assert refusal.value.hint == (
        f"close a session or try again when one has ended; in {LIMITS.idle_s:.0f} s the longest idle one expires"
    )


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["a", "b"]), st.sampled_from(["a", "b"])), max_size=20))
def test_random_histories_of_two_owners_never_mix(steps: list[tuple[str, str]]) -> None:
    """(who calls, whose session): a round is answered exactly when the two are one, and goes on where it was."""
    access = SessionAccess(toy_engine(), 1)
    replies = {owner: access.prime(owner, msgspec.structs.replace(PRIME, prompt=[*PROMPT, 2])) for owner in ("a", "b")}
    ids = {owner: [*PROMPT, 2, reply.root] for owner, reply in replies.items()}
    rounds = dict.fromkeys(replies, 0)
    for caller, owner in steps:
        known = ids[owner]
        message = wire.VerifyRequest(wire.PROTOCOL_VERSION, len(known), wire.committed_digest(known), [], [])
        if caller != owner:
            with pytest.raises(ProtocolError) as refusal:
                access.verify(caller, replies[owner].session, rounds[owner] + 1, message)
            assert refusal.value.code == wire.UNKNOWN_SESSION
            continue
        rounds[owner] += 1
        ids[owner] += access.verify(owner, replies[owner].session, rounds[owner], message).tokens
        assert ids[owner][len(PROMPT) + 1 :] == MODEL.greedy([*PROMPT, 2], rounds[owner] + 1)
