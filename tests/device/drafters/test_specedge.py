"""Proactive drafting: what a right guess keeps, that a wrong one loses nothing, and when drafting stops."""

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from itertools import count

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hyco_export.device.calls import Overlap
from hyco_export.device.drafters import (
    Draft,
    Drafter,
    ProactiveDrafter,
    ProactiveSpecEdgeDrafter,
    SpecEdgeDrafter,
    TreeRule,
)
from hyco_export.device.driver import Generation, generate
from hyco_export.device.interfaces import Given, Request
from hyco_export.device.link import SkippingClock
from hyco_export.device.tree_builder import SlmState
from hyco_export.errors import ProtocolError, ServerError
from hyco_export.protocol import wire
from hyco_export.protocol.trace import GenerationTrace
from hyco_export.protocol.tree import path_to
from tests.device.test_slm import MODEL, toy_slm
from tests.support.scripted import STOP_ID, VOCAB_SIZE, ScriptedServer, ScriptedSlm
from tests.support.scripted import ToyLanguageModel as Model
from tests.support.toy_graphs import KEEP_IDS

PROMPT = [5, 9, 2, 7]
KEEP = np.arange(VOCAB_SIZE)
RULE = TreeRule(math.log(0.9), 12, 4, passes=3)
PATIENCE_S = 30.0  # nothing here takes a second


class SlowServer(ScriptedServer):
    """Its verdict leaves only after the device has made so many passes, or has nothing more to draft."""

    def __init__(self, model: Model, passes: int, forget_before: tuple[int, ...] = ()) -> None:
        super().__init__(model, forget_before)
        self._passes = passes
        self.made = threading.Semaphore(0)
        self.idle = threading.Event()

    def verify(self, session: str, round_number: int, request: wire.VerifyRequest) -> wire.VerifyReply:
        for _ in range(self._passes):
            while not self.made.acquire(timeout=0.01):
                if self.idle.is_set():
                    break
        return super().verify(session, round_number, request)


class WatchedDrafter(ProactiveSpecEdgeDrafter):
    """Tells the server of every pass it makes ahead; checks the ring after every proposal."""

    server: SlowServer
    slm: ScriptedSlm

    def propose(self, ids):
        self.server.idle.clear()
        while self.server.made.acquire(blocking=False):
            pass
        draft = super().propose(ids)
        assert self.slm.tokens == list(ids)[self.slm.first :]  # what the plain drafter's ring holds at this point
        return draft

    def draft_ahead(self) -> Iterator[None]:
        for _ in super().draft_ahead():
            self.server.made.release()
            yield
        self.server.idle.set()


def request(cap: int = 30) -> Request:
    return Request("specedge-pd", "p", wire.Sampling(0.0, 64, 0.95), wire.EXACT, 7, cap)


def run(
    model: Model, slm_model: Model, passes: int, cap: int = 30, counted: bool = False, forget_before: Sequence[int] = ()
) -> tuple[GenerationTrace, ScriptedSlm]:
    slm = ScriptedSlm(slm_model, KEEP, rows=14)
    rule = msgspec.structs.replace(RULE, counts_ahead=counted)
    drafter = WatchedDrafter(SlmState(slm, KEEP, {STOP_ID}), rule)
    drafter.server, drafter.slm = SlowServer(model, passes, forget_before), slm
    return generate(PROMPT, request(cap), drafter, drafter.server), slm


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 1 << 30), passes=st.integers(0, 5), alike=st.booleans(), counted=st.booleans())
def test_text_and_ring_are_the_plain_drafters(seed: int, passes: int, alike: bool, counted: bool) -> None:
    model = Model(seed=seed, stop_bias=0.0)
    trace, _ = run(model, model if alike else Model(seed=seed + 1), passes, counted=counted)
    assert list(trace.tokens) == model.answer(PROMPT, 30)


def test_right_guesses_start_the_next_tree_and_make_it_deeper() -> None:
    model = Model(seed=3, stop_bias=-1e9)
    patient, _ = run(model, model, passes=4, cap=60)
    counted, _ = run(model, model, passes=4, cap=60, counted=True)
    slm = SlmState(ScriptedSlm(model, KEEP, rows=14), KEEP, {STOP_ID})
    plain = generate(PROMPT, request(60), SpecEdgeDrafter(slm, RULE), ScriptedServer(model))
    hits = [entry for entry in patient.rounds if entry.reused]
    assert 3 < len(hits) < len(patient.rounds)  # both happen
    assert all(entry.ahead_ms > 0 for entry in patient.rounds[:-1])
    depth = max(len(path_to(e.tree.parents, row)) for e in hits for row in range(len(e.tree)))
    assert depth > 3  # passes of two rounds in one tree
    assert max(len(path_to(e.tree.parents, row)) for e in counted.rounds for row in range(len(e.tree))) <= 3
    assert max(len(path_to(e.tree.parents, row)) for e in plain.rounds for row in range(len(e.tree))) <= 3


def test_drafting_ahead_takes_its_own_time_and_none_of_a_link_whose_time_is_skipped() -> None:
    model, clock, skipped = Model(seed=3, stop_bias=-1e9), SkippingClock(), threading.Event()

    class Far(SlowServer):
        """Its reply has come a long way by the time that it is there."""

        def verify(self, session: str, round_number: int, request: wire.VerifyRequest) -> wire.VerifyReply:
            reply = super().verify(session, round_number, request)
            clock.wait(3600.0)
            skipped.set()
            return reply

    class Late(WatchedDrafter):
        """Its last pass before the reply ends after the link's time was skipped."""

        def draft_ahead(self) -> Iterator[None]:
            skipped.clear()
            for _ in super().draft_ahead():
                skipped.wait(PATIENCE_S)
                yield

    slm = ScriptedSlm(model, KEEP, rows=14)
    drafter = Late(SlmState(slm, KEEP, {STOP_ID}), RULE)
    drafter.server, drafter.slm = Far(model, passes=1), slm
    trace = generate(PROMPT, request(20), drafter, drafter.server, clock)
    assert all(0 < entry.ahead_ms < 1_000 * PATIENCE_S for entry in trace.rounds[:-1])
    assert all(entry.wait_ms > 3_600_000 for entry in trace.rounds)


def test_a_wrong_guess_leaves_the_trees_of_the_plain_drafter() -> None:
    model, other = Model(seed=3, stop_bias=-1e9), Model(seed=8, stop_bias=-1e9)
    proactive, _ = run(model, other, passes=4)
    slm = ScriptedSlm(other, KEEP, rows=14)
    plain = generate(
        PROMPT,
        request(),
        SpecEdgeDrafter(SlmState(slm, KEEP, {STOP_ID}), RULE),
        ScriptedServer(model),
    )
    misses = [entry for entry in proactive.rounds if not entry.reused]
    assert len(misses) > 5
    by_length = {entry.length: entry.tree for entry in plain.rounds}
    compared = [entry for entry in misses if entry.length in by_length]
    assert len(compared) > 5
    for entry in compared:
        assert entry.tree == by_length[entry.length]


def test_ring_bytes_are_those_of_the_plain_drafter() -> None:
    prompt, answers = [4, 6], {}
    rings = {}
    for name, passes in (("plain", None), ("proactive", 4)):
        slm, _, _ = toy_slm(rows=8, ring=40, sliding_ring=40)
        drafter: Drafter
        if passes is None:
            drafter = SpecEdgeDrafter(SlmState(slm, KEEP_IDS, {STOP_ID}), TreeRule(math.log(0.9), 8, 3, passes=3))
            server = ScriptedServer(MODEL)
        else:
            drafter = WatchedGraphDrafter(SlmState(slm, KEEP_IDS, {STOP_ID}), TreeRule(math.log(0.9), 8, 3, passes=3))
            drafter.server = server = SlowServer(MODEL, passes)
        trace = generate(prompt, request(24), drafter, server)
        answers[name] = trace.tokens
        rings[name] = slm._inputs.rings, slm.length
    assert answers["plain"] == answers["proactive"] == tuple(MODEL.answer(prompt, 24))
    held = min(length for _, length in rings.values())
    assert held > 15
    for name, array in rings["plain"][0].items():
        assert np.array_equal(array[:, :held], rings["proactive"][0][name][:, :held])


class WatchedGraphDrafter(ProactiveSpecEdgeDrafter):
    server: SlowServer

    def draft_ahead(self) -> Iterator[None]:
        for _ in super().draft_ahead():
            self.server.made.release()
            yield
        self.server.idle.set()

    def propose(self, ids):
        self.server.idle.clear()
        return super().propose(ids)


@pytest.mark.parametrize("forget_before", [(1,), (2, 3), (4,)])
def test_a_lost_session_forgets_every_guess(forget_before: tuple[int, ...]) -> None:
    model = Model(seed=3, stop_bias=-1e9)
    trace, _ = run(model, model, passes=4, forget_before=forget_before)
    assert list(trace.tokens) == model.answer(PROMPT, 30)
    assert len(trace.primes) == 1 + len(forget_before)


def test_rows_of_dropped_guesses_are_forgotten() -> None:
    model = Model(seed=3, stop_bias=-1e9)
    _, slm = run(model, model, passes=4, cap=60)
    assert len(slm.contexts) < 200  # of about a thousand rows that were made


def test_a_round_that_is_sent_again_goes_on_with_its_guess() -> None:
    model = Model(seed=3, stop_bias=-1e9)
    slm = ScriptedSlm(model, KEEP, rows=14)
    drafter = ProactiveSpecEdgeDrafter(SlmState(slm, KEEP, {STOP_ID}), RULE)
    server = FlakyServer(model)
    generation = Generation(PROMPT, request(), drafter, server)
    while not generation.finished:
        try:
            generation.step()
        except ServerError:
            continue
    generation.close()
    assert list(generation.ids[len(PROMPT) :]) == model.answer(PROMPT, 30)
    assert server.failures > 3
    assert all(first == second for first, second in server.sent_twice)


class FlakyServer(ScriptedServer):
    """Every second call breaks before it reaches the server."""

    def __init__(self, model: Model) -> None:
        super().__init__(model)
        self.failures = 0
        self.sent_twice: list[tuple[wire.VerifyRequest, wire.VerifyRequest]] = []
        self._broken: wire.VerifyRequest | None = None

    def verify(self, session: str, round_number: int, request: wire.VerifyRequest) -> wire.VerifyReply:
        if self._broken is None:
            self._broken = request
            self.failures += 1
            raise ServerError("no answer")
        self.sent_twice.append((self._broken, request))
        self._broken = None
        return super().verify(session, round_number, request)


# ------------------------------------------------------------------------------------------------------- Overlap


def counter() -> Callable[[], float]:
    ticks = count()
    return lambda: float(next(ticks))


def test_passes_stop_when_the_reply_is_there() -> None:
    third, made = threading.Event(), []

    def passes() -> Iterator[None]:
        while True:  # ends because the reply comes, or never
            made.append(len(made))
            if len(made) == 3:
                third.set()
            yield

    def call() -> str:
        assert third.wait(PATIENCE_S)
        return "verdict"

    waiting = Overlap(counter())
    reply, ahead_ms = waiting.call(call, passes())
    waiting.close()
    assert reply == "verdict" and ahead_ms >= 3_000 and len(made) >= 3


def test_a_reply_that_comes_first_leaves_no_time_to_draft() -> None:
    waiting = Overlap()
    made: list[int] = []

    def passes() -> Iterator[None]:
        made.append(1)
        yield

    def refuse() -> str:
        raise ProtocolError("round_stale", "too late")

    with pytest.raises(ProtocolError, match="too late"):
        waiting.call(refuse, passes())
    assert len(made) <= 1
    waiting.close()


def test_a_pass_that_fails_waits_for_the_reply_first() -> None:
    waiting, done = Overlap(), threading.Event()

    def failing() -> Iterator[None]:
        raise RuntimeError("the pass failed")
        yield

    def call() -> str:
        done.set()
        return "verdict"

    with pytest.raises(RuntimeError, match="the pass failed"):
        while True:  # the reply may be quicker than the first pass
            waiting.call(call, failing())
    assert done.is_set()
    waiting.close()


def test_only_drafters_that_can_draft_ahead_are_asked_to() -> None:
    class Plain:
        def begin(self, ids: list[int], given: Given) -> None: ...
        def propose(self, ids: list[int]) -> Draft: ...  # type: ignore[empty-body]
        def observe(self, accepted: list[int], ids: list[int], given: Given) -> None: ...

    slm = SlmState(ScriptedSlm(Model(), KEEP), KEEP, set())
    assert not isinstance(Plain(), ProactiveDrafter)
    assert not isinstance(SpecEdgeDrafter(slm, RULE), ProactiveDrafter)
    assert isinstance(ProactiveSpecEdgeDrafter(slm, RULE), ProactiveDrafter)
