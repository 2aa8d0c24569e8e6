"""Named links, with the publication behind each figure and what of it is our assumption.

The paper's own link (LTE-CA or 5G NSA, as the operator assigned) is known only by 40 to 58 ms a round for network and
serialisation together (HyCo, Appendix F): it lies between `lte` and `5g-nsa`.
"""

import time
from collections.abc import Callable

from hyco_export.errors import HycoError
from hyco_export.runtime.link.clock import LinkClock, SkippingClock, WaitingClock
from hyco_export.runtime.link.model import Link
from hyco_export.runtime.link.transport import LinkTransport
from hyco_export.runtime.ports import Transport

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
