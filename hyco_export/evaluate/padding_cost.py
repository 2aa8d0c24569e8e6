"""What hiding the sizes of replies would cost: bytes and distinct sizes of a run's rounds, from traces alone."""

from collections.abc import Sequence

import msgspec

from hyco_export.runtime.padding import padded_size
from hyco_export.runtime.trace import RoundTrace

STEPS_BYTES = (4_096, 16_384, 65_536)


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
