"""Calls that are tried again: how long, how often, under which name."""

from collections.abc import Iterator

import pytest

from hyco_export.device.calls import RetryingTransport
from hyco_export.device.link import Link, SkippingClock
from hyco_export.errors import ProtocolError, UnreachableError
from hyco_export.protocol import wire
from hyco_export.server.engine import LocalTransport
from tests.device.test_transport import INFO, PRIME, over, toy_engine
from tests.support.scripted import (
    NO_TRAFFIC,
)


class Script:
    """A transport whose PRIME raises the given errors first."""

    traffic = NO_TRAFFIC

    def __init__(self, errors: list[Exception]) -> None:
        self.errors: Iterator[Exception] = iter(errors)
        self.calls = 0

    def prime(self, request: wire.PrimeRequest) -> wire.PrimeReply:
        self.calls += 1
        error = next(self.errors, None)
        if error is not None:
            raise error
        return wire.PrimeReply(1, "s", 4, 3, "", None, 1.0)


def persistent(script: Script, patience_s: float) -> tuple[RetryingTransport, list[float]]:
    pauses: list[float] = []
    return RetryingTransport(script, patience_s, lambda: sum(pauses), pauses.append), pauses  # type: ignore[arg-type]


def test_persistence_doubles_its_pauses_and_ends() -> None:
    script = Script([UnreachableError("gone")] * 100)
    transport, pauses = persistent(script, 20.0)
    with pytest.raises(UnreachableError):
        transport.prime(PRIME)
    assert pauses[:7] == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0] and sum(pauses) <= 20.0


def test_a_prime_keeps_its_name_over_all_tries_and_another_has_another() -> None:
    names = []

    class Naming(Script):
        def prime(self, request: wire.PrimeRequest) -> wire.PrimeReply:
            names.append(request.attempt)
            return super().prime(request)

    transport = persistent(Naming([UnreachableError("gone")] * 2), 20.0)[0]
    transport.prime(PRIME)
    assert len(names) == 3 and len(set(names)) == 1 and names[0]
    transport.prime(PRIME)
    assert names[3] != names[0]


def test_lost_replies_leave_no_sessions_behind() -> None:
    engine = toy_engine()
    clock = SkippingClock(lambda: 0.0)
    lossy = Link("lossy", 10.0, 0.0, 8.0, 8.0, resets=0.5)
    transport = over(lossy, LocalTransport(engine, INFO), 3, clock)
    for _ in range(30):
        transport.prime(PRIME)
    assert engine.session_count == 30


def test_persistence_waits_for_what_time_cures_and_for_nothing_else() -> None:
    cured = Script([ProtocolError("shutting_down", "stopping"), ProtocolError("sessions_full", "full")])
    transport = persistent(cured, 5.0)[0]
    assert transport.prime(PRIME).session == "s" and cured.calls == 3
    assert transport.traffic.repeats == 2
    transport.prime(PRIME)
    assert transport.traffic.repeats == 0
    hopeless = Script([ProtocolError("prompt_size", "too long")])
    with pytest.raises(ProtocolError):
        persistent(hopeless, 5.0)[0].prime(PRIME)
    assert hopeless.calls == 1
