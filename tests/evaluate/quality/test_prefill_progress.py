"""Progress of a long prompt: told while the call waits, and never in its way."""

import threading
from typing import Any

import pytest

from hyco_export.errors import ServerError
from hyco_export.evaluate.quality.prefill_progress import LABEL, LONG_IDS, WatchedTransport
from hyco_export.protocol import wire
from tests.support.scripted import NO_TRAFFIC, ScriptedServer, ToyLanguageModel

STUCK_S = 30.0


def prime_request(length: int) -> wire.PrimeRequest:
    return wire.PrimeRequest(
        version=wire.PROTOCOL_VERSION, prompt=[4] * length, sampling=wire.PAPER_SAMPLING, acceptance=wire.EXACT, seed=1,
        max_new_tokens=4, draft_side="device", draft_steps=0, head_digest="",
    )  # fmt: skip


class WaitingServer(ScriptedServer):
    """Answers PRIME when `ready` is set."""

    def __init__(self) -> None:
        super().__init__(ToyLanguageModel())
        self.ready = threading.Event()
        self.answer: Any = None

    def prime(self, request: wire.PrimeRequest) -> Any:
        assert self.ready.wait(STUCK_S)
        return "the reply"


def test_a_long_prompt_is_told_step_by_step() -> None:
    server, steps = WaitingServer(), []
    counts = iter((256, 512, LONG_IDS + 9))

    def prefilled() -> int:
        return next(counts)

    def step(*told: Any) -> None:
        steps.append(told)
        if len(steps) == 3:
            server.ready.set()
            watched._interval_s = STUCK_S  # no fourth question

    watched = WatchedTransport(server, prefilled, step, interval_s=0.001)
    assert watched.prime(prime_request(LONG_IDS)) == "the reply"
    assert steps == [(LABEL, done, LONG_IDS) for done in (256, 512, LONG_IDS - 1, LONG_IDS)]


@pytest.mark.parametrize("said", [None, ServerError("no metrics")])
def test_a_server_that_does_not_say_is_not_asked_again(said: Exception | None) -> None:
    server, asked, steps = WaitingServer(), [], []

    def prefilled() -> None:
        asked.append(1)
        server.ready.set()
        if said is not None:
            raise said

    watched = WatchedTransport(server, prefilled, lambda *told: steps.append(told), interval_s=0.001)
    assert watched.prime(prime_request(LONG_IDS)) == "the reply"
    assert asked == [1] and steps == [(LABEL, LONG_IDS, LONG_IDS)]


def test_short_prompts_and_other_calls_pass_through() -> None:
    server = WaitingServer()
    server.ready.set()
    watched = WatchedTransport(server, lambda: pytest.fail("asked"), lambda *_: pytest.fail("told"))
    assert watched.prime(prime_request(LONG_IDS - 1)) == "the reply"
    assert watched.traffic == NO_TRAFFIC
    watched.close_session("s")
    assert server.closed == ["s"]
