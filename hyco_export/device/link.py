"""A modelled network link: the delay and the fate of each call over it, deterministic by seed.

A call is a request and a reply on an open connection. Each direction costs its propagation (half the round trip), its
jitter, its bytes at its bandwidth, and one round trip for every time that lost packets are sent again (TCP's fast
retransmit, or the last packet's probe). Slow start is left out: a kept-alive connection has grown its window, so the
model is optimistic about the first large reply.
"""

import time
from collections.abc import Callable
from typing import TypeVar

import msgspec
import numpy as np

from hyco_export.core.numerics import BITS_PER_MBIT, MS_PER_S
from hyco_export.device.client import Patience
from hyco_export.device.interfaces import Transport
from hyco_export.errors import HycoError, ProtocolError, UnreachableError
from hyco_export.protocol import wire
from hyco_export.protocol.wire import Traffic

PACKET_BYTES = 1_400  # of a body in an IP packet over a mobile network
BITS_PER_BYTE = 8
Reply = TypeVar("Reply")


class Link(msgspec.Struct, frozen=True):
    """What a network does.

    Jitter is exponential with mean `jitter_ms` in each direction: most packets are on time, some are late. Outages
    begin `outages_per_min` times a minute (Poisson) and last `outage_s`; nothing passes meanwhile. `resets` is the
    share of calls whose connection breaks, half of them before the request arrived, half before the reply did.
    """

    name: str
    rtt_ms: float
    jitter_ms: float
    down_mbit_s: float
    up_mbit_s: float
    loss: float = 0.0  # share of packets
    outages_per_min: float = 0.0
    outage_s: float = 0.0
    resets: float = 0.0

    def __post_init__(self) -> None:
        rules = (
            (self.rtt_ms >= 0.0, "rtt_ms"),
            (self.jitter_ms >= 0.0, "jitter_ms"),
            (self.down_mbit_s > 0.0, "down_mbit_s"),
            (self.up_mbit_s > 0.0, "up_mbit_s"),
            (0.0 <= self.loss < 1.0, "loss"),
            (self.outages_per_min >= 0.0, "outages_per_min"),
            (self.outage_s >= 0.0, "outage_s"),
            (0.0 <= self.resets < 1.0, "resets"),
        )
        for holds, field in rules:
            if not holds:
                raise HycoError(
                    f"link {self.name}: {field} is {getattr(self, field)}, which no link has",
                    "times and rates are 0 or more, bandwidths above 0, shares below 1",
                )


class LinkDice:
    """The random part of a link: everything that it does to one call after another."""

    def __init__(self, link: Link, seed: int) -> None:
        self._link = link
        self._dice = np.random.Generator(np.random.Philox(seed))
        self._next_outage_s = self._until_outage_s()

    def up_ms(self, size_bytes: int) -> float:
        """Milliseconds for a request to arrive."""
        return self._direction_ms(size_bytes, self._link.up_mbit_s)

    def down_ms(self, size_bytes: int) -> float:
        """Milliseconds for a reply to arrive."""
        return self._direction_ms(size_bytes, self._link.down_mbit_s)

    def breaks(self) -> bool:
        """Does the connection break in this direction."""
        return bool(self._dice.random() < self._link.resets / 2)

    def outage_over_s(self, now_s: float) -> float:
        """When the outage at `now_s` is over; `now_s` itself where there is none. `now_s` must not go back."""
        while self._next_outage_s + self._link.outage_s <= now_s:
            self._next_outage_s += self._link.outage_s + self._until_outage_s()
        return self._next_outage_s + self._link.outage_s if now_s >= self._next_outage_s else now_s

    def _until_outage_s(self) -> float:
        if self._link.outages_per_min == 0.0 or self._link.outage_s == 0.0:
            return float("inf")
        return float(self._dice.exponential(60.0 / self._link.outages_per_min))

    def _direction_ms(self, size_bytes: int, mbit_s: float) -> float:
        link = self._link
        transfer_ms = MS_PER_S * size_bytes * BITS_PER_BYTE / (mbit_s * BITS_PER_MBIT)
        late_ms = float(self._dice.exponential(link.jitter_ms)) if link.jitter_ms else 0.0
        return link.rtt_ms / 2 + late_ms + transfer_ms + link.rtt_ms * self._repeats(size_bytes)

    def _repeats(self, size_bytes: int) -> int:
        """How many times lost packets are sent again until all are there."""
        missing, repeats = -(-size_bytes // PACKET_BYTES), 0
        while missing := int(self._dice.binomial(missing, self._link.loss)):
            repeats += 1
        return repeats


class SkippingClock:
    """Seconds of real work plus the waits that were skipped. Callable like `time.perf_counter`.

    It is one thread's time: what overlaps a wait (drafting while the reply is in flight) needs `WaitingClock`.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._skipped_s = 0.0

    def __call__(self) -> float:
        return self._now() + self._skipped_s

    def wait(self, seconds: float) -> None:
        self._skipped_s += max(0.0, seconds)


class WaitingClock:
    """Real time: a link's waits are slept."""

    def __call__(self) -> float:
        return time.perf_counter()

    def wait(self, seconds: float) -> None:
        time.sleep(max(0.0, seconds))


LinkClock = SkippingClock | WaitingClock


class LinkTransport:
    """Calls `inner` through a link.

    A round whose request or reply is lost is sent again after the pauses of `patience`, as `HttpTransport` does; other
    calls are not.

    Args:
        inner: does the call.
        link: what the network is like.
        seed: of everything random in it.
        clock: what the link's time is added to; give it to the driver, too.
        patience: retries of rounds.
    """

    def __init__(
        self, inner: Transport, link: Link, seed: int, clock: LinkClock, patience: Patience | None = None
    ) -> None:
        self._inner = inner
        self._dice = LinkDice(link, seed)
        self._link = link
        self._clock = clock
        self._started_s = clock()
        self._pauses_s = (patience or Patience()).pauses_s
        self.traffic = Traffic(0, 0, 0, 0)

    def info(self) -> wire.ServerInfo:
        return self._through(self._inner.info)

    def prime(self, request: wire.PrimeRequest) -> wire.PrimeReply:
        return self._through(lambda: self._inner.prime(request))

    def verify(self, session: str, round_number: int, request: wire.VerifyRequest) -> wire.VerifyReply:
        repeats = 0
        for pause_s in self._pauses_s:
            try:
                return self._through(lambda: self._inner.verify(session, round_number, request), repeats)
            except UnreachableError:
                repeats = self.traffic.repeats + 1
                self._clock.wait(pause_s)
        return self._through(lambda: self._inner.verify(session, round_number, request), repeats)

    def close_session(self, session: str) -> None:
        self._through(lambda: self._inner.close_session(session))

    def _through(self, call: Callable[[], Reply], repeats: int = 0) -> Reply:
        """One exchange, after `repeats` tries; a refusal takes as long as a reply.

        Raises:
            UnreachableError: request or reply was lost. The server has done the work in the second case.
        """
        self.traffic = Traffic(0, 0, 0, 0, repeats)
        self._require_link()
        self._require(self._dice.breaks(), "the request was lost")
        try:
            reply = call()
        except ProtocolError:
            self._arrive(repeats)
            raise
        except UnreachableError:
            self._count(repeats)
            raise
        self._arrive(repeats)
        return reply

    def _count(self, repeats: int) -> None:
        traffic = self._inner.traffic
        self.traffic = msgspec.structs.replace(traffic, repeats=traffic.repeats + repeats)

    def _arrive(self, repeats: int) -> None:
        """Wait for both directions, whose sizes are known only now; the server's own time has passed already."""
        self._count(repeats)
        up_ms = self._dice.up_ms(self.traffic.wire_up_bytes)
        self._clock.wait((up_ms + self._dice.down_ms(self.traffic.wire_down_bytes)) / MS_PER_S)
        self._require(self._dice.breaks(), "the reply was lost")
        self._require_link()

    def _require_link(self) -> None:
        """Raise if there is an outage now: what is sent in it is lost, which shows when it is over."""
        now_s = self._clock() - self._started_s
        over_s = self._dice.outage_over_s(now_s)
        if over_s > now_s:
            self._clock.wait(over_s - now_s)
            raise UnreachableError(f"link {self._link.name}: out for {over_s - now_s:.1f} s", "try again")

    def _require(self, broken: bool, what: str) -> None:
        if broken:
            self._clock.wait(self._link.rtt_ms / MS_PER_S)  # a reset is noticed when its packet comes back
            raise UnreachableError(f"link {self._link.name}: {what}", "try again")


# Named links, with the publication behind each figure and what is assumed.

# Huang et al., "A Close Examination of Performance and Power Characteristics of 4G LTE Networks", MobiSys 2012: medians
# of 3,000 users, 13 Mbit/s down, 6 Mbit/s up, round trip 70 ms. Jitter and loss are assumed.
LTE = Link("lte", rtt_ms=70.0, jitter_ms=5.0, down_mbit_s=13.0, up_mbit_s=6.0, loss=1e-3)

# Xu et al., "Understanding Operational 5G", SIGCOMM 2020 (3.5 GHz, non-standalone): 880 Mbit/s down and 130 Mbit/s up
# by UDP, of which TCP used less than 32 %; round trip 22 ms. Jitter and loss are assumed.
NSA = Link("5g-nsa", rtt_ms=22.0, jitter_ms=3.0, down_mbit_s=280.0, up_mbit_s=42.0, loss=1e-3)

# Pei et al., "WiFi can be the weakest link of round trip network latency in the wild", INFOCOM 2016: half of the
# packets wait more than 20 ms for the wireless hop, which is 60 % of the round trip: 13 ms for the rest. Two
# exponentials of mean 12 ms have that median; the measured tail (one in ten above 100 ms) is longer. Bandwidths and
# loss are assumed.
WIFI = Link("wifi", rtt_ms=13.0, jitter_ms=12.0, down_mbit_s=50.0, up_mbit_s=20.0, loss=1e-3)

PRESETS = {link.name: link for link in (LTE, NSA, WIFI)}


def find_link(name: str) -> Link:
    """The preset called `name`.

    Raises:
        HycoError: no such link; the hint lists the known ones.
    """
    if name not in PRESETS:
        raise HycoError(f"unknown link {name!r}", f"known ones: {', '.join(PRESETS)}")
    return PRESETS[name]


def over_link(
    transport: Transport, name: str | None, seed: int, waits: bool = False
) -> tuple[Transport, Callable[[], float]]:
    """A transport as if over a preset, and the clock that the driver must use; as it is without a name.

    Args:
        seed: of the link's jitter and losses.
        waits: sleep what the link takes. Without it the time is only counted, which is right for systems that do
            nothing while the reply is in flight.

    Raises:
        HycoError: no such link.
    """
    if name is None:
        return transport, time.perf_counter
    clock: LinkClock = WaitingClock() if waits else SkippingClock()
    return LinkTransport(transport, find_link(name), seed, clock), clock
