"""The engine over the scripted toy model: rounds, retries, refusals, endings, expiry, faults."""

import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hyco_export.errors import ProtocolError
from hyco_export.protocol import wire
from hyco_export.protocol.acceptance import RULES
from hyco_export.protocol.tree import ROOT
from hyco_export.server.admission import Batching, Facts, Limits
from hyco_export.server.engine import Engine
from hyco_export.server.interfaces import Chain, Check, Prefill, SequentialModels
from tests.support.scripted import (
    RESTRICTED_IDS,
    STOP_ID,
    VOCAB_SIZE,
    WINDOW,
    ScriptedSession,
    ToyLanguageModel,
    toy_e,
    toy_h,
)

HEAD = "head-artifact-key"
FACTS = Facts(
    vocab_size=VOCAB_SIZE,
    stop_ids=frozenset({STOP_ID}),
    context_limit=64,
    head_digest=HEAD,
    handoff_window=WINDOW,
    server_steps=4,
    restricts=True,
)
PROMPT = [5, 6, 7, 8]
GREEDY = wire.Sampling(0.0, 0, 1.0)
EXACT = wire.Acceptance("exact", 1.0)


class Bench:
    """An engine over the toy model, with the sessions it opened and a clock that the test turns."""

    def __init__(self, limits: Limits | None = None, model: ToyLanguageModel | None = None) -> None:
        self.model = model or ToyLanguageModel(stop_bias=-99.0)  # long answers
        self.opened: list[ScriptedSession] = []
        self.now_s = 0.0
        self.engine = Engine(self._open, FACTS, limits or Limits(prompt_limit=40), now=lambda: self.now_s)

    def _open(self) -> ScriptedSession:
        self.opened.append(ScriptedSession(self.model))
        return self.opened[-1]


def prime_request(**changes: object) -> wire.PrimeRequest:
    request = wire.PrimeRequest(
        version=wire.PROTOCOL_VERSION,
        prompt=PROMPT,
        sampling=GREEDY,
        acceptance=EXACT,
        seed=7,
        max_new_tokens=12,
        draft_side="device",
        draft_steps=0,
        head_digest="",
    )
    return msgspec.structs.replace(request, **changes)


def round_request(ids: Sequence[int], tokens: Sequence[int] = (), parents: Sequence[int] = ()) -> wire.VerifyRequest:
    return wire.VerifyRequest(wire.PROTOCOL_VERSION, len(ids), wire.committed_digest(ids), list(tokens), list(parents))


def refusal(action: object, *arguments: object) -> ProtocolError:
    with pytest.raises(ProtocolError) as caught:
        action(*arguments)  # type: ignore[operator]
    return caught.value


def random_tree(generator: np.random.Generator, likely: Sequence[int]) -> tuple[list[int], list[int]]:
    """A tree without duplicate siblings that holds the right continuation now and then."""
    edges: dict[tuple[int, int], None] = {}
    for _ in range(int(generator.integers(0, 10))):
        parent = int(generator.integers(ROOT, len(edges)))
        edges[parent, int(generator.choice([*likely, *range(VOCAB_SIZE)]))] = None
    return [token for _, token in edges], [parent for parent, _ in edges]


def generate(engine: Engine, request: wire.PrimeRequest, seed: int, model: ToyLanguageModel) -> list[int]:
    """All new tokens, drafting random trees."""
    generator = np.random.default_rng(seed)
    reply = engine.prime(request)
    ids = [*request.prompt, reply.root]
    finished, number = reply.finished, 0
    while not finished:
        number += 1
        tokens, parents = random_tree(generator, model.greedy(ids, 3))
        answer = engine.verify(reply.session, number, round_request(ids, tokens, parents))
        ids += answer.tokens
        finished = answer.finished
    return ids[len(request.prompt) :]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from(sorted(RULES)))
def test_greedy_text_is_plain_greedy_decoding_for_any_trees(seed: int, rule: str) -> None:
    model = ToyLanguageModel(seed=seed % 97)
    acceptance = wire.Acceptance(rule, 0.005 if "epsilon" in RULES[rule].options else 1.0)
    request = prime_request(acceptance=acceptance, max_new_tokens=1 + seed % 20)
    assert generate(Bench(model=model).engine, request, seed, model) == model.answer(PROMPT, request.max_new_tokens)


def test_an_oracles_chain_is_taken_whole_and_handed_off() -> None:
    bench = Bench()
    reply = bench.engine.prime(prime_request(head_digest=HEAD))
    assert (reply.length, reply.finished) == (5, "") and reply.handoff is not None
    assert reply.handoff.first_position == 0 and reply.handoff.e == toy_e(reply.root).tobytes()
    ids = [*PROMPT, reply.root]
    chain = bench.model.greedy(ids, 4)
    answer = bench.engine.verify(reply.session, 1, round_request(ids, chain[:3], [ROOT, 0, 1]))
    assert answer.tokens == chain and answer.accepted == [0, 1, 2] and answer.drawn == [True] * 3
    assert answer.round == 1 and answer.drafted == 0 and answer.server_ms >= 0
    # old root and three accepted nodes: positions 4 ... 7
    assert answer.handoff is not None and answer.handoff.first_position == 4 and len(answer.handoff.kv) == 4 * 8
    assert answer.handoff.h == toy_h([*ids, *chain[:3]]).tobytes()
    assert answer.handoff.e == toy_e(chain[3]).tobytes()


def test_an_empty_tree_commits_one_token() -> None:
    bench = Bench()
    reply = bench.engine.prime(prime_request())
    ids = [*PROMPT, reply.root]
    answer = bench.engine.verify(reply.session, 1, round_request(ids))
    assert answer.tokens == bench.model.greedy(ids, 1) and answer.accepted == [] and answer.handoff is None


def test_the_first_handoff_is_at_most_a_window() -> None:
    reply = Bench().engine.prime(prime_request(prompt=list(range(2, 14)), head_digest=HEAD))
    assert reply.handoff is not None
    assert reply.handoff.first_position == 12 - WINDOW and len(reply.handoff.kv) == WINDOW * 8


def test_the_server_drafts_its_own_chain_but_no_more_than_can_be_committed() -> None:
    bench = Bench()
    request = prime_request(draft_side="server", draft_steps=4, max_new_tokens=8)
    reply = bench.engine.prime(request)
    ids = [*PROMPT, reply.root]
    drafted = []
    for number in (1, 2):
        answer = bench.engine.verify(reply.session, number, round_request(ids))
        ids += answer.tokens
        drafted.append(answer.drafted)
    # 7 tokens are left after the first: a chain of 4 and its bonus, then a chain of 1 and the last token
    assert drafted == [4, 1] and answer.finished == "length"
    assert ids[len(PROMPT) :] == bench.model.greedy(PROMPT, 8)


@pytest.mark.parametrize(
    ("tokens", "parents", "code"),
    [
        ([1, 2], [ROOT], "tree_shape"),
        ([VOCAB_SIZE], [ROOT], "token_range"),
        ([-1], [ROOT], "token_range"),
        ([2**63 - 1], [ROOT], "token_range"),
        ([3, 3], [ROOT, ROOT], "duplicate_sibling"),
        ([3, 4], [1, 0], "parent_order"),
        ([3], [-2], "parent_order"),
        ([3] * 65, list(range(-1, 64)), "tree_size"),
    ],
)
def test_bad_trees_are_refused_and_the_session_lives_on(tokens: list[int], parents: list[int], code: str) -> None:
    bench = Bench()
    reply = bench.engine.prime(prime_request())
    ids = [*PROMPT, reply.root]
    assert refusal(bench.engine.verify, reply.session, 1, round_request(ids, tokens, parents)).code == code
    assert bench.engine.verify(reply.session, 1, round_request(ids)).round == 1


def test_a_tree_where_the_server_drafts_is_refused() -> None:
    bench = Bench()
    reply = bench.engine.prime(prime_request(draft_side="server", draft_steps=2))
    request = round_request([*PROMPT, reply.root], [3], [ROOT])
    assert refusal(bench.engine.verify, reply.session, 1, request).code == "unsupported"


@pytest.mark.parametrize(
    ("changes", "code", "message"),
    [
        ({"prompt": []}, "value_range", "prompt is empty"),
        ({"prompt": [VOCAB_SIZE]}, "token_range", "prompt holds an id outside"),
        ({"prompt": [-1]}, "token_range", "prompt holds an id outside"),
        ({"prompt": [2] * 41}, "prompt_size", "prompt has 41 ids, at most 40"),
        ({"max_new_tokens": 0}, "value_range", "max_new_tokens is 0"),
        ({"max_new_tokens": 61}, "value_range", "need 65 positions, the verifier was made for 64"),
        ({"seed": -1}, "value_range", "seed is -1"),
        ({"continue_from": 4}, "value_range", "continue_from is 4"),
        ({"continue_from": 3, "max_new_tokens": 3}, "value_range", "continue_from is 3"),
        ({"sampling": wire.Sampling(float("nan"), 0, 1.0)}, "value_range", "sampling.temperature is nan"),
        ({"sampling": wire.Sampling(1e-9, 0, 1.0)}, "value_range", "sampling.temperature is 1e-09"),
        ({"sampling": wire.Sampling(1.0, -1, 1.0)}, "value_range", "sampling.top_k is -1"),
        ({"sampling": wire.Sampling(1.0, 0, 0.0)}, "value_range", "sampling.top_p is 0.0"),
        ({"acceptance": wire.Acceptance("epsilon", 0.0)}, "value_range", "acceptance.epsilon is 0.0"),
        ({"acceptance": wire.Acceptance("exact", float("inf"))}, "unsupported", "acceptance.epsilon is inf"),
        ({"draft_side": "cloud"}, "unsupported", "draft_side is 'cloud'"),
        ({"draft_scope": "x" * 99}, "unsupported", f"draft_scope is '{'x' * 40}'"),
        ({"acceptance": wire.Acceptance("fuzzy", 1.0)}, "unsupported", "acceptance.rule is 'fuzzy'"),
        ({"acceptance": wire.Acceptance("exact", 0.5)}, "unsupported", "acceptance.epsilon is 0.5"),
        ({"draft_scope": "artifact"}, "unsupported", "the server drafts nothing in this session"),
        ({"draft_side": "reply", "draft_steps": 0}, "value_range", "draft_steps is 0"),
        ({"draft_side": "server", "draft_steps": 2, "unverified": True}, "unsupported", "unverified needs a device"),
        ({"head_digest": "another"}, "head_mismatch", "head_digest names head artifact 'another'"),
        ({"draft_side": "server", "draft_steps": 5}, "value_range", "draft_steps is 5, this server drafts 1 to 4"),
        ({"draft_side": "server", "draft_steps": 0}, "value_range", "draft_steps is 0, this server drafts 1 to 4"),
        ({"draft_steps": 4}, "value_range", "draft_steps is 4, it must be 0 where the device drafts"),
    ],
)
def test_prime_requests_that_cannot_be_served_are_refused_with_the_field(
    changes: dict[str, object], code: str, message: str
) -> None:
    bench = Bench()
    refused = refusal(bench.engine.prime, prime_request(**changes))
    assert refused.code == code and message in refused.message
    assert bench.opened == [] and bench.engine.session_count == 0  # nothing was allocated


def test_a_server_without_head_or_artifact_says_so() -> None:
    facts = msgspec.structs.replace(FACTS, head_digest="", server_steps=0, handoff_window=0)
    engine = Engine(lambda: ScriptedSession(ToyLanguageModel()), facts)
    assert "this server holds none" in refusal(engine.prime, prime_request(head_digest=HEAD)).message
    refused = refusal(engine.prime, prime_request(draft_side="server", draft_steps=2))
    assert refused.code == "unsupported" and "has no head of its own" in refused.message
    assert engine.prime(prime_request()).handoff is None


def test_idle_sessions_expire_and_make_room() -> None:
    bench = Bench(Limits(sessions=2, idle_s=60.0, prompt_limit=40))
    first = bench.engine.prime(prime_request())
    bench.now_s = 50.0
    second = bench.engine.prime(prime_request())
    refused = refusal(bench.engine.prime, prime_request())
    assert refused.code == "sessions_full" and refused.message == "all 2 sessions are in use"
    bench.now_s = 61.0
    third = bench.engine.prime(prime_request())
    assert bench.opened[0].closed and not bench.opened[1].closed
    refused = refusal(bench.engine.verify, first.session, 1, round_request([*PROMPT, first.root]))
    assert refused.code == wire.UNKNOWN_SESSION and refused.hint == "prime again with the committed ids"
    bench.engine.verify(second.session, 1, round_request([*PROMPT, second.root]))  # used: lives on
    bench.now_s = 112.0
    assert bench.engine.expire() == 0 and bench.engine.session_count == 2
    bench.now_s = 122.0
    assert bench.engine.expire() == 2 and third.session


def test_closing_frees_and_may_be_repeated() -> None:
    bench = Bench()
    reply = bench.engine.prime(prime_request())
    bench.engine.close(reply.session)
    bench.engine.close(reply.session)
    assert bench.opened[0].closed and bench.engine.session_count == 0
    other = bench.engine.prime(prime_request())
    bench.engine.shut_down()
    assert bench.opened[1].closed and bench.engine.session_count == 0 and other.session


def test_session_ids_cannot_be_guessed() -> None:
    bench = Bench()
    names = {bench.engine.prime(prime_request()).session for _ in range(10)}
    assert len(names) == 10 and all(len(name) == 22 for name in names)  # 128 bits in base64


class FaultySession(ScriptedSession):
    """Fails at its n-th call to the model."""

    def __init__(self, model: ToyLanguageModel, failing_call: int) -> None:
        super().__init__(model)
        self._failing_call = failing_call
        self._calls = 0

    def _count(self) -> None:
        self._calls += 1
        if self._calls == self._failing_call:
            raise RuntimeError("out of memory at prompt 5 6 7 8")

    def prime(self, ids: np.ndarray) -> np.ndarray:
        self._count()
        return super().prime(ids)

    def verify(self, root: int, tokens: np.ndarray, parents: np.ndarray) -> np.ndarray:
        self._count()
        return super().verify(root, tokens, parents)


@pytest.mark.parametrize("failing_call", [1, 2])
def test_a_fault_of_the_model_ends_its_session_and_no_other(failing_call: int) -> None:
    model = ToyLanguageModel()
    sessions = [FaultySession(model, failing_call), ScriptedSession(model)]
    engine = Engine(iter(sessions).__next__, FACTS)
    if failing_call == 1:
        refused = refusal(engine.prime, prime_request())
    else:
        faulty = engine.prime(prime_request())
        refused = refusal(engine.verify, faulty.session, 1, round_request([*PROMPT, faulty.root]))
        assert refusal(engine.verify, faulty.session, 1, round_request(PROMPT)).code == wire.UNKNOWN_SESSION
    assert refused.code == "model_fault" and refused.message == "the model failed: RuntimeError"
    assert sessions[0].closed and engine.session_count == 0
    healthy = engine.prime(prime_request())
    ids = [*PROMPT, healthy.root]
    assert engine.verify(healthy.session, 1, round_request(ids)).tokens == model.greedy(ids, 1)


def test_logits_that_are_not_finite_are_a_fault() -> None:
    class Broken(ToyLanguageModel):
        def logits(self, ids: Sequence[int]) -> np.ndarray:
            return np.full(VOCAB_SIZE, np.nan, np.float32)

    assert refusal(Bench(model=Broken()).engine.prime, prime_request()).code == "model_fault"


@pytest.mark.parametrize("threads", [1, 4])
def test_sampled_tokens_are_the_same_alone_and_among_other_sessions(threads: int) -> None:
    request = prime_request(sampling=wire.Sampling(1.0, 8, 0.95))
    model = ToyLanguageModel()
    requests = [msgspec.structs.replace(request, seed=seed, prompt=[3 + seed, *PROMPT]) for seed in range(8)]
    alone = [generate(Bench().engine, request, seed, model) for seed, request in enumerate(requests)]
    assert len({tuple(text) for text in alone}) > 4
    engine = Bench().engine
    together: dict[int, list[int]] = {}

    def work(mine: Sequence[int]) -> None:
        for seed in mine:
            together[seed] = generate(engine, requests[seed], seed, model)

    workers = [threading.Thread(target=work, args=(range(first, 8, threads),)) for first in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(timeout=60)
    assert [together[seed] for seed in range(8)] == alone


# --- memory


def test_memory_is_reserved_before_a_prompt_is_touched_and_given_back() -> None:
    model = ToyLanguageModel(stop_bias=-99.0)
    opened: list[ScriptedSession] = []

    def open_session() -> ScriptedSession:
        opened.append(ScriptedSession(model))
        return opened[-1]

    limits = Limits(prompt_limit=40, cache_bytes=40_000_000, idle_s=60.0)
    now_s = 0.0
    engine = Engine(open_session, FACTS, limits, now=lambda: now_s, models=SequentialModels(position_bytes=1_000_000))
    first = engine.prime(prime_request(max_new_tokens=12))  # 4 + 12 positions
    assert engine.reserved_bytes == 16_000_000 and opened[0].positions == 16
    now_s = 10.0
    engine.prime(prime_request(max_new_tokens=4))
    assert engine.reserved_bytes == 24_000_000
    refused = refusal(engine.prime, prime_request(max_new_tokens=13))
    assert refused.code == "cache_full" and len(opened) == 2
    assert refused.message == "prompt and max_new_tokens need 17.0 MB of cache, 16.0 MB of 40.0 MB are free"
    assert refused.hint == (
        "try again when another session has ended, in 50 s the longest idle one expires; or ask for fewer tokens"
    )
    never = refusal(engine.prime, prime_request(max_new_tokens=37))
    assert never.code == "cache_size" and never.hint == "shorten the prompt or ask for fewer tokens"
    assert never.message == "prompt and max_new_tokens need 41.0 MB of cache, this server has 40.0 MB"
    engine.close(first.session)
    assert engine.reserved_bytes == 8_000_000
    engine.prime(prime_request(max_new_tokens=13))
    now_s = 100.0
    assert engine.expire() == 2 and engine.reserved_bytes == 0


def test_a_finished_generation_holds_no_memory_but_its_last_reply() -> None:
    model = ToyLanguageModel(stop_bias=-99.0)
    limits = Limits(prompt_limit=40, cache_bytes=100)
    engine = Engine(lambda: ScriptedSession(model), FACTS, limits, models=SequentialModels(position_bytes=1))
    reply = engine.prime(prime_request(max_new_tokens=1))
    assert reply.finished == "length" and engine.reserved_bytes == 0 and engine.session_count == 1
    faulty = Engine(lambda: FaultySession(model, 1), FACTS, limits, models=SequentialModels(position_bytes=1))
    assert refusal(faulty.prime, prime_request()).code == "model_fault" and faulty.reserved_bytes == 0


# --- several sessions in a pass


class Passes(SequentialModels):
    """Keeps what each pass computed, and lets the test hold one open."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[list[Prefill | Check]] = []
        self.entered = threading.Semaphore(0)
        self.hold = threading.Event()
        self.release = threading.Semaphore(0)
        self.fault_in: Callable[[Sequence[Prefill | Check]], bool] = lambda _: False

    def forward(self, parts: Sequence[Prefill | Check]) -> list[np.ndarray]:
        self.seen.append(list(parts))
        if self.hold.is_set():
            self.entered.release()
            assert self.release.acquire(timeout=30)
        if self.fault_in(parts):
            raise RuntimeError("out of memory")
        return super().forward(parts)


class Crowd:
    """Several sessions that call at once: their calls are queued behind a pass that the test holds open."""

    def __init__(self, count: int, batching: Batching, limits: Limits | None = None) -> None:
        self.model = ToyLanguageModel(stop_bias=-99.0)
        self.passes = Passes()
        self.opened: list[ScriptedSession] = []
        self.now_s = 0.0
        self.engine = Engine(
            self._open,
            FACTS,
            limits or Limits(prompt_limit=40),
            now=lambda: self.now_s,
            models=self.passes,
            batching=batching,
        )
        self.primed = [self.engine.prime(prime_request(prompt=[3 + place, *PROMPT])) for place in range(count)]
        self.ids = [[3 + place, *PROMPT, reply.root] for place, reply in enumerate(self.primed)]
        self.passes.seen.clear()

    def _open(self) -> ScriptedSession:
        self.opened.append(ScriptedSession(self.model))
        return self.opened[-1]

    def start(self, action: Callable[..., object], *arguments: object) -> "Started":
        return Started(action, arguments)

    def round(self, place: int) -> "Started":
        request = round_request(self.ids[place], [2, 3], [ROOT, 0])
        return self.start(self.engine.verify, self.primed[place].session, 1, request)

    def block(self) -> "Started":
        """A session of its own whose pass is held open."""
        self.passes.hold.set()
        blocker = self.start(self.engine.prime, prime_request(prompt=[2, 2]))
        assert self.passes.entered.acquire(timeout=30)
        return blocker

    def wait_for_queue(self, count: int) -> None:
        deadline_s = time.monotonic() + 30
        while len(self.engine._scheduler._waiting) < count:
            assert time.monotonic() < deadline_s
            time.sleep(0.001)

    def go(self) -> None:
        self.passes.hold.clear()
        self.passes.release.release()


class Started:
    """A call on a thread of its own."""

    def __init__(self, action: Callable[..., object], arguments: Sequence[object]) -> None:
        self._outcome: list[object] = []
        self._thread = threading.Thread(target=self._work, args=(action, arguments), daemon=True)
        self._thread.start()

    def _work(self, action: Callable[..., object], arguments: Sequence[object]) -> None:
        try:
            self._outcome.append(action(*arguments))
        except ProtocolError as error:
            self._outcome.append(error)

    def result(self) -> Any:
        self._thread.join(timeout=30)
        return self._outcome[0]


def test_a_retry_beside_its_round_gets_the_same_reply() -> None:
    crowd = Crowd(1, Batching(sessions=4))
    crowd.block()
    both = [crowd.round(0), crowd.round(0)]
    crowd.wait_for_queue(2)
    crowd.go()
    assert both[0].result() == both[1].result()
    assert [len(parts) for parts in crowd.passes.seen] == [1, 1]  # the retry needed no pass


def test_deleting_a_session_frees_it_after_the_pass_it_is_in() -> None:
    crowd = Crowd(1, Batching())
    crowd.passes.hold.set()
    call = crowd.round(0)
    assert crowd.passes.entered.acquire(timeout=30)
    crowd.engine.close(crowd.primed[0].session)
    assert crowd.engine.session_count == 0 and not crowd.opened[0].closed  # its rows are being computed
    crowd.go()
    call.result()
    assert crowd.opened[0].closed


def test_a_caller_that_goes_away_gets_no_further_pass() -> None:
    crowd = Crowd(1, Batching(prefill_rows=8))
    disconnected = threading.Event()
    crowd.passes.hold.set()
    call = crowd.start(crowd.engine.prime, prime_request(prompt=[4] * 36, max_new_tokens=3), disconnected.is_set)
    assert crowd.passes.entered.acquire(timeout=30)
    disconnected.set()
    crowd.go()
    assert call.result().code == "cancelled"
    assert len(crowd.passes.seen) == 1 and crowd.opened[1].closed and crowd.engine.session_count == 1
    # a round that never began has changed nothing: it may be sent again
    request = round_request(crowd.ids[0])
    again = crowd.start(crowd.engine.verify, crowd.primed[0].session, 1, request, disconnected.is_set)
    assert again.result().code == "cancelled"
    assert crowd.round(0).result().round == 1


def test_waiting_sessions_are_not_idle_and_shutting_down_lets_them_end() -> None:
    crowd = Crowd(2, Batching(), Limits(prompt_limit=40, idle_s=10.0))
    crowd.block()
    call = crowd.round(0)
    crowd.wait_for_queue(1)
    crowd.now_s = 11.0
    assert crowd.engine.expire() == 1  # the other one
    stopped = crowd.start(crowd.engine.shut_down)
    crowd.go()
    assert stopped.result() == 0
    assert call.result().round == 1
    assert refusal(crowd.engine.prime, prime_request()).code == "shutting_down"
    assert crowd.engine.session_count == 0 and all(session.closed for session in crowd.opened)


@pytest.mark.parametrize("scope", ["full", "artifact"])
def test_a_chain_for_the_next_tree_comes_with_every_reply(scope: str) -> None:
    bench = Bench()
    allowed = RESTRICTED_IDS if scope == "artifact" else None
    request = prime_request(draft_side="reply", draft_steps=4, draft_scope=scope, max_new_tokens=7)
    reply = bench.engine.prime(request)
    ids = [*PROMPT, reply.root]
    assert reply.chain == bench.model.greedy(ids, 4, allowed)
    answer = bench.engine.verify(reply.session, 1, round_request(ids, reply.chain[:2], [ROOT, 0]))
    assert answer.drafted == 0
    ids += answer.tokens
    left = 7 - len(ids[len(PROMPT) :])
    assert answer.chain == bench.model.greedy(ids, min(4, left - 1), allowed)  # the bonus takes the last place
    while not answer.finished:
        answer = bench.engine.verify(reply.session, answer.round + 1, round_request(ids))
        ids += answer.tokens
    assert answer.chain == []


def test_chains_that_go_along_with_replies_are_drafted_together() -> None:
    class Drafting(Passes):
        def __init__(self) -> None:
            super().__init__()
            self.together: list[int] = []

        def draft(self, chains: Sequence[Chain]) -> list[tuple[int, ...]]:
            self.together.append(len(chains))
            if len(self.together) == 2:
                raise RuntimeError("planted")
            return super().draft(chains)

    crowd = Crowd(1, Batching())
    drafting = [
        crowd.engine.prime(prime_request(draft_side="reply", draft_steps=4, prompt=[5 + place, *PROMPT]))
        for place in range(2)
    ]
    crowd.passes = crowd.engine._scheduler._models = Drafting()

    def rounds(number: int, ids: list[list[int]]) -> list[Any]:
        crowd.block()
        sessions = [(reply.session, own) for reply, own in zip(drafting, ids, strict=True)]
        started = [crowd.start(crowd.engine.verify, name, number, round_request(own)) for name, own in sessions]
        other = crowd.start(crowd.engine.verify, crowd.primed[0].session, number, round_request(crowd.ids[0]))
        crowd.wait_for_queue(3)
        crowd.go()
        crowd.ids[0] += other.result().tokens
        return [call.result() for call in started]

    ids = [[5 + place, *PROMPT, reply.root] for place, reply in enumerate(drafting)]
    replies = rounds(1, ids)
    ids = [own + reply.tokens for own, reply in zip(ids, replies, strict=True)]
    assert [reply.chain for reply in replies] == [crowd.model.greedy(own, 4) for own in ids]
    assert [refused.code for refused in rounds(2, ids)] == ["model_fault"] * 2  # a fault is these sessions' alone
    assert crowd.passes.together == [2, 2]
    assert crowd.engine.verify(crowd.primed[0].session, 3, round_request(crowd.ids[0])).round == 3


def test_a_server_without_a_keep_set_cannot_restrict_its_head() -> None:
    facts = msgspec.structs.replace(FACTS, restricts=False)
    engine = Engine(lambda: ScriptedSession(ToyLanguageModel()), facts)
    refused = refusal(engine.prime, prime_request(draft_side="reply", draft_steps=2, draft_scope="artifact"))
    assert refused.code == "unsupported" and "holds no head artifact with its keep set" in refused.message


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32 - 1), st.booleans())
def test_kept_tokens_are_committed_unjudged_and_what_follows_is_judged_behind_them(seed: int, handed: bool) -> None:
    generator = np.random.default_rng(seed)
    model = ToyLanguageModel(seed=seed % 89, stop_bias=-99.0)
    bench = Bench(model=model)
    request = prime_request(unverified=True, max_new_tokens=20, head_digest=HEAD if handed else "")
    reply = bench.engine.prime(request)
    ids, finished, number = [*PROMPT, reply.root], reply.finished, 0
    while not finished:
        number += 1
        room = 20 - (len(ids) - len(PROMPT))
        kept = [int(t) for t in generator.integers(2, VOCAB_SIZE, int(generator.integers(0, min(4, room))))]
        tokens, parents = random_tree(generator, model.greedy([*ids, *kept], 3))
        body = msgspec.structs.replace(round_request(ids, tokens, parents), kept=kept)
        answer = bench.engine.verify(reply.session, number, body)
        before = len(ids)
        ids += kept
        assert answer.tokens == model.greedy(ids, len(answer.tokens))
        ids += answer.tokens
        finished = answer.finished
        if handed and not finished:
            assert answer.handoff is not None and answer.handoff.first_position == before - 1
            assert answer.handoff.h == toy_h(ids[:-1]).tobytes()
        if not finished:
            assert bench.opened[0].ids == ids[:-1]
    assert len(ids) == len(PROMPT) + 20


@pytest.mark.parametrize(
    ("primed", "kept", "code", "message"),
    [
        (False, [4], "unsupported", "the session verifies every token"),
        (True, [STOP_ID], "value_range", "kept holds a stop id"),
        (True, [4] * 12, "value_range", "kept holds 12 tokens, 11 may be committed"),
        (True, [VOCAB_SIZE], "token_range", "token 16 is outside"),
    ],
)
def test_tokens_that_may_not_be_kept_are_refused(primed: bool, kept: list[int], code: str, message: str) -> None:
    bench = Bench()
    reply = bench.engine.prime(prime_request(unverified=primed))
    body = msgspec.structs.replace(round_request([*PROMPT, reply.root]), kept=kept)
    refused = refusal(bench.engine.verify, reply.session, 1, body)
    assert refused.code == code and message in refused.message


def test_kept_tokens_count_as_nodes() -> None:
    bench = Bench(Limits(prompt_limit=40, node_limit=5))
    reply = bench.engine.prime(prime_request(unverified=True, max_new_tokens=30))
    body = round_request([*PROMPT, reply.root], [2, 3, 4], [ROOT] * 3)
    refused = refusal(bench.engine.verify, reply.session, 1, msgspec.structs.replace(body, kept=[2, 3, 4]))
    assert refused.code == "tree_size"


class Drafts(Passes):
    """Says when something was drafted."""

    def __init__(self) -> None:
        super().__init__()
        self.begun: queue.SimpleQueue[int] = queue.SimpleQueue()
        self.failing = False

    def draft(self, chains: Sequence[Chain]) -> list[tuple[int, ...]]:
        failing = self.failing
        self.begun.put(len(chains))
        if failing:
            raise RuntimeError("out of memory")
        return super().draft(chains)


def drafting_engine() -> tuple[Engine, Drafts, ToyLanguageModel]:
    model, models = ToyLanguageModel(stop_bias=-99.0), Drafts()
    return Engine(lambda: ScriptedSession(model), FACTS, Limits(prompt_limit=40), models=models), models, model


def test_the_next_chain_is_drafted_while_the_reply_travels() -> None:
    engine, models, model = drafting_engine()
    reply = engine.prime(prime_request(draft_side="server", draft_steps=4))
    assert models.begun.get(timeout=30) == 1  # nobody has asked for a round yet
    ids = [*PROMPT, reply.root]
    answer = engine.verify(reply.session, 1, round_request(ids))
    assert answer.drafted == 4 and answer.tokens == model.greedy(ids, len(answer.tokens))
    assert models.begun.get(timeout=30) == 1  # the second round's
    assert engine.verify(reply.session, 1, round_request(ids)) == answer
    engine.shut_down()
    assert models.begun.empty() and engine.reserved_bytes == 0


def test_a_fault_while_drafting_ahead_ends_no_session() -> None:
    engine, models, model = drafting_engine()
    models.failing = True
    reply = engine.prime(prime_request(draft_side="server", draft_steps=4))
    assert models.begun.get(timeout=30) == 1
    models.failing = False
    ids = [*PROMPT, reply.root]
    answer = engine.verify(reply.session, 1, round_request(ids))
    assert answer.drafted == 4 and answer.tokens == model.greedy(ids, len(answer.tokens))
    engine.shut_down()


def test_nothing_is_drafted_ahead_for_a_call_that_was_refused() -> None:
    engine, models, _ = drafting_engine()
    refused = refusal(engine.prime, prime_request(draft_side="server", draft_steps=4), lambda: True)
    assert refused.code == "cancelled"
    engine.shut_down()
    assert models.begun.empty()
