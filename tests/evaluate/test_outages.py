"""A server that goes away between rounds: the same tokens, counted, and no figure of time that knows of it.

A live server over HTTP in this process; a clock that only calls and pauses move. Every figure is compared with that of
an undisturbed run.
"""

from collections.abc import Iterator

import msgspec
import numpy as np
import pytest

from hyco_export.core.keepset import KeepSet
from hyco_export.dev.peers.comparison import CloudMtp
from hyco_export.device.calls import RetryingTransport
from hyco_export.device.client import HttpTransport
from hyco_export.device.driver import generate
from hyco_export.device.interfaces import Request
from hyco_export.errors import HycoError
from hyco_export.evaluate.link_costs import estimate_link
from hyco_export.evaluate.metrics import SystemMetrics, measure
from hyco_export.evaluate.pictures import median_times
from hyco_export.protocol import wire
from hyco_export.protocol.trace import GenerationTrace, from_lines, to_lines
from hyco_export.server.admission import Facts, Limits
from hyco_export.server.engine import Engine
from hyco_export.server.http import create_app
from tests.support.live_server import LiveServer
from tests.support.oracle import OracleDrafter
from tests.support.scripted import STOP_ID, VOCAB_SIZE, WINDOW, ScriptedServer, ScriptedSession, ToyLanguageModel

MODEL = ToyLanguageModel(stop_bias=-1e9)
FACTS = Facts(VOCAB_SIZE, frozenset({STOP_ID}), 256, "head", WINDOW, 4)
INFO = wire.ServerInfo(1, "test", "v", "t", VOCAB_SIZE, [STOP_ID], "head", "keep", 32, 64, 0, ["exact"], "thread-cpu")
KEEPSET = KeepSet(np.arange(VOCAB_SIZE), VOCAB_SIZE)
PROMPT = [5, 9, 2, 7]
DEPTH = 2  # three tokens a round: what three lost sessions commit by PRIME is one round less
CAP = 1 + 10 * (DEPTH + 1)
DRAFT_S, CALL_S, SERVER_MS = 0.002, 0.005, 3.0
TIMES = ("server_ms_per_token", "delivery_tokens_per_s", "draft_ms_per_token", "wait_ms_per_round", "first_token_ms")
TOKENS = (
    "prompts", "output_tokens", "mat", "tokens_by_source", "tokens_by_rule", "chain_acceptance", "bonus_misses",
    "threshold_stops", "capped_rounds", "early_rounds",
)  # fmt: skip


class World:
    """A server that restarts (all sessions lost) before the rounds of `restarts`, or whose reply to one of
    `lost_replies` is lost; answers to rounds are counted over all sessions, replayed ones too."""

    def __init__(self, restarts: tuple[int, ...] = (), lost_replies: tuple[int, ...] = ()) -> None:
        self.now_s = 0.0
        self.server = LiveServer(self._app)
        self._restarts = set(restarts)
        self._lost_replies = set(lost_replies)
        self._rounds = 0
        world = self

        class Calls(HttpTransport):
            """Every answered call takes CALL_S and says SERVER_MS."""

            def prime(self, request: wire.PrimeRequest) -> wire.PrimeReply:
                return world.timed(super().prime(request))

            def verify(self, session: str, round_number: int, request: wire.VerifyRequest) -> wire.VerifyReply:
                return world.timed(super().verify(session, round_number, request))

            def _exchange(self, method: str, path: str, body: bytes) -> bytes:
                world.before(path)
                answer = super()._exchange(method, path, body)
                world.after(path)
                return answer

        http = Calls(self.server.url, pause=self.pause)
        self.transport = RetryingTransport(http, 60.0, lambda: self.now_s, self.pause)

    def _app(self):  # type: ignore[no-untyped-def]
        return create_app(Engine(lambda: ScriptedSession(MODEL), FACTS, Limits(prompt_limit=64)), INFO)

    def before(self, path: str) -> None:
        if "/rounds/" in path and self._rounds + 1 in self._restarts:
            self._restarts.remove(self._rounds + 1)
            self.server.stop()

    def after(self, path: str) -> None:
        if "/rounds/" in path:
            self._rounds += 1
            if self._rounds in self._lost_replies:
                self._lost_replies.remove(self._rounds)
                raise ConnectionResetError("the reply was lost")

    def pause(self, seconds: float) -> None:
        self.now_s += seconds
        if seconds >= 1.0 and not self.server.running:  # the client has tried for a while
            self.server.start()

    def timed(self, reply):  # type: ignore[no-untyped-def]
        self.now_s += CALL_S
        return msgspec.structs.replace(reply, server_ms=SERVER_MS)

    def answer(self, cap: int = CAP) -> GenerationTrace:
        def continuation(ids, depth):  # type: ignore[no-untyped-def]
            self.now_s += DRAFT_S
            return MODEL.greedy(ids, depth)

        request = Request("hyco", "p", wire.Sampling(0.0, 64, 0.95), wire.EXACT, 3, cap)
        trace = generate(PROMPT, request, OracleDrafter(continuation, DEPTH), self.transport, lambda: self.now_s)
        self.server.stop()
        (again,) = from_lines(to_lines(trace))
        assert again == trace  # a bench is measured from its file
        return again


@pytest.fixture(scope="module")
def undisturbed() -> Iterator[GenerationTrace]:
    yield World().answer()


def figures(metrics: SystemMetrics, names: tuple[str, ...]) -> dict[str, object]:
    return {name: getattr(metrics, name) for name in names}


def test_three_restarts_are_counted_and_change_neither_tokens_nor_times(undisturbed: GenerationTrace) -> None:
    trace = World(restarts=(2, 5, 6)).answer()
    assert trace.tokens == undisturbed.tokens == tuple(MODEL.answer(PROMPT, CAP))
    assert [prime.continue_from > 0 for prime in trace.primes] == [False, True, True, True]
    seen, expected = measure("hyco", [trace], KEEPSET), measure("hyco", [undisturbed], KEEPSET)
    assert seen.disturbances.reprimes == seen.disturbances.calls == 3
    # each time: the stale connection, then tries without a server until the one after the last pause of a round
    assert [call.traffic.repeats for call in trace.disturbed] == [3, 3, 3]
    assert (expected.disturbances.reprimes, expected.disturbances.repeats) == (0, 0)
    same = tuple(name for name in TOKENS if name not in ("tokens_by_source", "tokens_by_rule", "chain_acceptance"))
    assert figures(seen, same) == figures(expected, same)  # the others count one round less, whose tokens PRIME drew
    assert [(step.depth, step.share) for step in seen.chain_acceptance] == [(1, 1.0), (2, 1.0)]
    shorter = World().answer(CAP - DEPTH - 1)  # as many undisturbed steps
    alike = measure("hyco", [shorter], KEEPSET)
    assert figures(seen, TIMES) == pytest.approx(figures(alike, TIMES))
    phases, expected_phases = median_times("hyco", [trace]), median_times("hyco", [shorter])
    assert phases is not None and expected_phases is not None
    assert phases.phases == pytest.approx(expected_phases.phases)
    assert estimate_link([[trace]]).rtt_ms == pytest.approx(estimate_link([[shorter]]).rtt_ms)
    assert trace.total_ms > undisturbed.total_ms + 3_000.0  # it did take longer
    assert trace.total_ms - seen.disturbances.ms == pytest.approx(shorter.total_ms)


def test_a_verdict_that_is_replayed_changes_no_token_and_no_time(undisturbed: GenerationTrace) -> None:
    trace = World(lost_replies=(4, 7)).answer()
    assert trace.tokens == undisturbed.tokens and len(trace.primes) == 1
    seen, expected = measure("hyco", [trace], KEEPSET), measure("hyco", [undisturbed], KEEPSET)
    assert figures(seen, TOKENS) == figures(expected, TOKENS)
    assert (seen.disturbances.reprimes, seen.disturbances.repeats, seen.disturbances.calls) == (0, 2, 2)
    assert [number for number, record in enumerate(trace.rounds, 1) if record.lost_ms is not None] == [
        4,
        6,
    ]  # the replay counts
    shorter = measure("hyco", [World().answer(CAP - 2 * (DEPTH + 1))], KEEPSET)
    assert figures(seen, TIMES) == pytest.approx(figures(shorter, TIMES))
    assert seen.bytes_up.wire_max == expected.bytes_up.wire_max  # not those of both tries


def test_a_connection_that_went_stale_between_answers_is_no_time_to_a_first_token() -> None:
    world = World()
    world.transport.info()
    world.server.stop()
    world.server.start()
    disturbed = world.answer()
    assert [call.traffic.repeats for call in disturbed.disturbed] == [1]
    both = measure("hyco", [disturbed, World().answer()], KEEPSET)
    assert both.first_token_ms == pytest.approx(1e3 * CALL_S)


def test_bench_peers_takes_no_time_from_an_answer_with_an_outage() -> None:
    assert CloudMtp(ScriptedServer(MODEL, handoffs=False), 2).answer(PROMPT, 9).tokens == tuple(MODEL.answer(PROMPT, 9))
    with pytest.raises(HycoError, match="1 calls were sent again or made for a lost session"):
        CloudMtp(ScriptedServer(MODEL, forget_before=(2,), handoffs=False), 2).answer(PROMPT, 9)
