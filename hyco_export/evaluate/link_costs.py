"""What the calls of a run tell about the link: round trip and goodput, and the price of padded replies.

A call's wait is the round trip, the server's time and its bytes over the bandwidth. Small rounds give the round trip,
the large first replies the bandwidth. Server time is CPU time on a CPU server, so queueing counts as link.
"""

import math
from collections.abc import Iterable, Sequence

import msgspec
import numpy as np

from hyco_export.core.numerics import BITS_PER_MBIT, MS_PER_S
from hyco_export.evaluate.metrics import timed_steps
from hyco_export.protocol.trace import GenerationTrace, PrimeTrace, RoundTrace
from hyco_export.protocol.wire import padded_size

CLEARLY = 4.0  # standard errors of the slope: below that it may be noise
BITS_PER_BYTE = 8
STEPS_BYTES = (4_096, 16_384, 65_536)


class LinkEstimate(msgspec.Struct, frozen=True):
    """`rtt_ms` of an empty call; `down_mbit_s` of reply bytes, nan where the replies are too alike to tell."""

    rtt_ms: float
    down_mbit_s: float
    calls: int


def estimate_link(traces: Iterable[Sequence[GenerationTrace]]) -> LinkEstimate:
    """Least squares of wait - server time over the replies' bytes, undisturbed PRIME and VERIFY calls together.

    Raises:
        ValueError: no such call.
    """
    timed = timed_steps(trace for group in traces for trace in group)
    calls: list[PrimeTrace | RoundTrace] = [*timed.primes, *timed.rounds]
    if not calls:
        raise ValueError("no call without a disturbance")
    size = np.array([call.traffic.wire_down_bytes for call in calls], dtype=np.float64)  # [n]
    link_ms = np.array([call.wait_ms - call.server_ms for call in calls])  # [n]
    spread = size - size.mean()
    ms_per_byte = float(spread @ link_ms / (spread @ spread)) if spread.any() else 0.0
    rest = link_ms - link_ms.mean() - ms_per_byte * spread
    error = math.sqrt(float(rest @ rest) / max(1, len(calls) - 2) / float(spread @ spread)) if spread.any() else 0.0
    if ms_per_byte <= CLEARLY * error or ms_per_byte == 0.0:  # noise: the replies are too small or too alike to show it
        return LinkEstimate(float(np.median(link_ms)), float("nan"), len(calls))
    bandwidth = BITS_PER_BYTE * MS_PER_S / ms_per_byte / BITS_PER_MBIT
    return LinkEstimate(float(np.median(link_ms - ms_per_byte * size)), bandwidth, len(calls))


def link_note(traces: Iterable[Sequence[GenerationTrace]]) -> str:
    """One line for a report."""
    try:
        estimate = estimate_link(traces)
    except ValueError as error:
        return f"The link was not measured: {error}."
    speed = "too fast to tell" if np.isnan(estimate.down_mbit_s) else f"{estimate.down_mbit_s:.3g} Mbit/s down"
    return f"The link as {estimate.calls} calls saw it: {estimate.rtt_ms:.3g} ms round trip, {speed}."


class PaddingCost(msgspec.Struct, frozen=True):
    """`factor` is padded over plain bytes; `sizes` how many different ones a watcher sees, `plain_sizes` without."""

    step_bytes: int
    factor: float
    sizes: int
    plain_sizes: int


def padding_cost(rounds: Sequence[RoundTrace], step_bytes: int) -> PaddingCost:
    """Of the replies' bodies.

    Raises:
        ValueError: no round.
    """
    if not rounds:
        raise ValueError("no round whose reply could be padded")
    plain = [record.traffic.payload_down_bytes for record in rounds]
    padded = [padded_size(size, step_bytes) for size in plain]
    return PaddingCost(step_bytes, sum(padded) / sum(plain), len(set(padded)), len(set(plain)))


def padding_note(system: str, rounds: Sequence[RoundTrace]) -> str:
    """One line for a report."""
    costs = [padding_cost(rounds, step) for step in STEPS_BYTES]
    steps = "; ".join(
        f"of {cost.step_bytes:,} B {cost.factor:.2f} times the bytes (sizes left: {cost.sizes})" for cost in costs
    )
    return (
        f"Replies of {system} have {costs[0].plain_sizes} different sizes. With `serve --pad-replies` they would take, "
        f"padded to multiples {steps}."
    )
