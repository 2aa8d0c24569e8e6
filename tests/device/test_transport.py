"""Generations over bad links: whatever is lost, doubled, late or restarted, the text stays that of a perfect link."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hyco_export.device.calls import RetryingTransport
from hyco_export.device.drafters import Drafter, NullDrafter
from hyco_export.device.driver import generate
from hyco_export.device.interfaces import Request
from hyco_export.device.link import LTE, Link, LinkTransport, SkippingClock, WaitingClock, over_link
from hyco_export.errors import ProtocolError, UnreachableError
from hyco_export.protocol import wire
from hyco_export.protocol.trace import GenerationTrace
from hyco_export.server.admission import Limits
from hyco_export.server.engine import Engine, LocalTransport
from tests.support.scripted import (
    FACTS,
    INFO,
    KEEP_ALL,
    ScriptedHead,
    ScriptedSession,
    ScriptedSlm,
    ToyLanguageModel,
    hybrid_of,
)

MODEL = ToyLanguageModel(seed=5, stop_bias=-1e9)
PROMPT = [5, 9, 2, 7]
CAP = 20
PATIENCE_S = 1e4
QUIET = Link("quiet", rtt_ms=50.0, jitter_ms=0.0, down_mbit_s=8.0, up_mbit_s=8.0)
BAD = Link(
    "bad", rtt_ms=80.0, jitter_ms=20.0, down_mbit_s=2.0, up_mbit_s=1.0, loss=0.05,
    outages_per_min=20.0, outage_s=1.5, resets=0.3,
)  # fmt: skip


def toy_engine(sessions: int = 512) -> Engine:
    return Engine(lambda: ScriptedSession(MODEL), FACTS, Limits(prompt_limit=64, sessions=sessions))


def hybrid() -> Drafter:
    return hybrid_of(ScriptedHead(MODEL), ScriptedSlm(MODEL, KEEP_ALL))


def request(kind: str = "hyco") -> Request:
    head = "head" if kind == "hyco" else ""
    side, steps = ("server", 4) if kind == "cloud-mtp" else ("device", 0)
    return Request(kind, "p", wire.Sampling(0.0, 64, 0.95), wire.EXACT, 3, CAP, side, steps, head)


class Chaos(LocalTransport):
    """Sends calls twice, restarts the server and lets sessions expire, as told."""

    def __init__(self, engine: Engine, seed: int) -> None:
        super().__init__(engine, INFO)
        self.engine = engine
        self.dice = np.random.default_rng(seed)
        self.doubled = self.restarts = 0

    def prime(self, request: wire.PrimeRequest) -> wire.PrimeReply:
        if self.dice.random() < 0.2:  # a session is left behind that nobody knows
            super().prime(request)
        return super().prime(request)

    def verify(self, session: str, round_number: int, request: wire.VerifyRequest) -> wire.VerifyReply:
        fate = self.dice.random()
        if fate < 0.1:
            for name in self.engine.held():
                self.engine.close(name)
            self.restarts += 1
        elif fate < 0.4:
            self.doubled += 1
            assert super().verify(session, round_number, request) == super().verify(session, round_number, request)
        return super().verify(session, round_number, request)


def over(link: Link, inner: LocalTransport, seed: int, clock: SkippingClock) -> RetryingTransport:
    return RetryingTransport(LinkTransport(inner, link, seed, clock), PATIENCE_S, clock, clock.wait)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 1 << 30), kind=st.sampled_from(["hyco", "plain", "cloud-mtp"]))
def test_text_over_a_bad_link_to_a_chaotic_server_is_plain_greedy_text(seed: int, kind: str) -> None:
    clock = SkippingClock(lambda: 0.0)
    drafter = hybrid() if kind == "hyco" else NullDrafter()
    trace = generate(PROMPT, request(kind), drafter, over(BAD, Chaos(toy_engine(), seed), seed, clock), clock)
    assert list(trace.tokens) == MODEL.answer(PROMPT, CAP)
    assert trace.total_ms == pytest.approx(clock() * 1e3, abs=20_000.0)


def test_the_bad_link_really_does_everything_that_it_says() -> None:
    seen: dict[str, int] = {}
    chaos = Chaos(toy_engine(), 0)

    class Watching(LinkTransport):
        def _through(self, *arguments):  # type: ignore[no-untyped-def]
            try:
                return super()._through(*arguments)
            except UnreachableError as error:
                kind = error.message.split(": ")[1].split(" for")[0]
                seen[kind] = seen.get(kind, 0) + 1
                raise

    clock = SkippingClock(lambda: 0.0)
    transport = RetryingTransport(Watching(chaos, BAD, 1, clock), PATIENCE_S, clock, clock.wait)
    for _ in range(10):
        assert list(generate(PROMPT, request(), hybrid(), transport, clock).tokens) == MODEL.answer(PROMPT, CAP)
    assert set(seen) == {"the request was lost", "the reply was lost", "out"}
    assert chaos.restarts > 3 and chaos.doubled > 10


def test_times_over_a_quiet_link_are_the_arithmetic() -> None:
    clock = SkippingClock(lambda: 0.0)
    trace = generate(PROMPT, request("plain"), NullDrafter(), LinkTransport(
        LocalTransport(toy_engine(), INFO), QUIET, 0, clock), clock)  # fmt: skip
    for entry in trace.rounds:
        size = entry.traffic.wire_up_bytes + entry.traffic.wire_down_bytes
        assert entry.wait_ms == pytest.approx(50.0 + size * 8 / 8e3)  # 8 Mbit/s is 8,000 bits a millisecond
        assert entry.draft_ms == 0.0
    assert trace.total_ms > 50.0 * len(trace.rounds)


def times(trace: GenerationTrace) -> list[float]:
    return [entry.wait_ms for entry in (*trace.primes, *trace.rounds)]


def test_the_same_seed_takes_the_same_time_and_another_takes_another() -> None:
    def run(seed: int) -> list[float]:
        clock = SkippingClock(lambda: 0.0)
        return times(generate(PROMPT, request(), hybrid(), over(BAD, Chaos(toy_engine(), 7), seed, clock), clock))

    assert run(3) == run(3) != run(4)


def test_a_round_is_tried_again_like_over_http_and_priming_is_not() -> None:
    class Counting(LocalTransport):
        calls = 0

        def prime(self, request: wire.PrimeRequest) -> wire.PrimeReply:
            self.calls += 1
            return super().prime(request)

        def verify(self, session: str, round_number: int, request: wire.VerifyRequest) -> wire.VerifyReply:
            self.calls += 1
            return super().verify(session, round_number, request)

    inner = Counting(toy_engine(), INFO)
    clock = SkippingClock(lambda: 0.0)
    transport = LinkTransport(inner, Link("dead", 10.0, 0.0, 1.0, 1.0, resets=0.999999), 1, clock)
    with pytest.raises(UnreachableError, match=r"link dead: the (request|reply) was lost"):
        transport.prime(wire.PrimeRequest(1, PROMPT, wire.Sampling(0.0, 64, 0.95), wire.EXACT, 1, 9, "device", 0, ""))
    before = clock()
    with pytest.raises((UnreachableError, ProtocolError)):
        for _ in range(50):
            transport.verify("s", 1, wire.VerifyRequest(1, 5, b"12345678", [], []))
    assert clock() - before >= 1.2  # the pauses of a round
    assert inner.calls <= 52


def test_refusals_take_their_time_too_and_are_not_repeated() -> None:
    clock = SkippingClock(lambda: 0.0)
    transport = over(QUIET, LocalTransport(toy_engine(), INFO), 0, clock)
    with pytest.raises(ProtocolError) as refusal:
        transport.verify("nobody", 1, wire.VerifyRequest(1, 5, b"12345678", [], []))
    assert refusal.value.code == wire.UNKNOWN_SESSION
    assert clock() == pytest.approx(0.05)


PRIME = wire.PrimeRequest(1, PROMPT, wire.Sampling(0.0, 64, 0.95), wire.EXACT, 1, 9, "device", 0, "")


def test_over_a_preset_by_name_with_waits_counted_or_taken() -> None:
    inner = LocalTransport(toy_engine(), INFO)
    assert over_link(inner, None, 0)[0] is inner
    counted, clock = over_link(inner, "lte", 0)
    assert isinstance(clock, SkippingClock)
    before = clock()
    counted.prime(PRIME)
    assert clock() - before >= LTE.rtt_ms / 1e3
    assert isinstance(over_link(inner, "lte", 0, waits=True)[1], WaitingClock)
    slept = WaitingClock()
    before = slept()
    slept.wait(0.01)
    assert slept() - before >= 0.01
