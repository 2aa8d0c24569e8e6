"""A link as numbers, and the fate of one call over it. Deterministic by seed; knows neither calls nor clocks.

One call is a request and a reply on a connection that is open already. A direction costs its propagation (half the
round trip), its jitter, its bytes at its bandwidth, and a round trip for every time that lost packets are sent again
(TCP's fast retransmit, or the last packet's probe). Slow start is left out: a kept-alive connection has grown its
window, so the model is kind to the first large reply.
"""

import msgspec
import numpy as np

from hyco_export.core.units import BITS_PER_MBIT, MS_PER_S
from hyco_export.errors import HycoError

PACKET_BYTES = 1_400  # of a body in an IP packet over a mobile network
BITS_PER_BYTE = 8


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
