"""A round of `hyco` can be followed: how many files it passes through, and how often it turns from one to another."""

from collections.abc import Callable
from typing import Any

from hyco_export.device.driver import generate
from hyco_export.device.systems import find_system, make_drafter, make_request
from hyco_export.protocol import wire
from hyco_export.server.admission import Limits
from hyco_export.server.engine import Engine, LocalTransport
from tests.device.test_systems import FACTS, INFO, MODEL, PAPER, PROMPT, SETTINGS, toy_device
from tests.support.round_walk import walks
from tests.support.scripted import ScriptedSession

FILES, SWITCHES = 14, 60
ROUNDS = 4


class Settled(Engine):
    """Answers when the model's thread has nothing more to do, so that the two threads never work at the same time."""

    def verify(self, *arguments: Any, **options: Any) -> wire.VerifyReply:
        reply = super().verify(*arguments, **options)
        with self._lock:
            assert self._scheduler._changed.wait_for(lambda: not self._scheduler._running, 30)
        return reply


class Marking(LocalTransport):
    """Marks where a round's call begins."""

    def __init__(self, engine: Engine, mark: Callable[[], None]) -> None:
        super().__init__(engine, INFO)
        self._mark = mark

    def verify(self, session: str, round_number: int, request: wire.VerifyRequest) -> wire.VerifyReply:
        self._mark()
        return super().verify(session, round_number, request)


def test_a_round_passes_through_few_files() -> None:
    system = find_system("hyco")
    engine = Settled(lambda: ScriptedSession(MODEL), FACTS, Limits(prompt_limit=64))
    drafter = make_drafter(system, SETTINGS, toy_device())
    request = make_request(system, SETTINGS, "p", PAPER, 1, 20)
    found = walks(lambda mark: generate(PROMPT, request, drafter, Marking(engine, mark)))
    assert len(found) == ROUNDS
    for walk in found:
        assert {"server/engine.py", "server/scheduler.py", "protocol/acceptance.py", "device/driver.py"} <= walk.files
        assert len(walk.files) <= FILES, sorted(walk.files)
        assert walk.switches <= SWITCHES, walk.path
