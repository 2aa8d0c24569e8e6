"""How far the figures of a system depend on which prompts were asked: percentile bootstrap over prompts.

A figure is a ratio of sums (tokens over rounds, milliseconds over tokens), and so it is in every draw. All answers to a
prompt (seeds, generations, the turns of one question) are drawn together.
"""

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from hyco_export.core.numerics import MS_PER_S
from hyco_export.evaluate.metrics import timed_steps
from hyco_export.evaluate.quality.evaluation_folder import TURN_MARK
from hyco_export.evaluate.quality.statistics import LEAST_PAIRS, draw_counts, interval_ends
from hyco_export.protocol.trace import GenerationTrace

PARTS = ("verified", "rounds", "server_ms", "tokens", "draft_ms", "ms")  # sums of one prompt, in this order
RATIOS = {  # measure of `SystemMetrics`: its numerator, denominator and unit's factor
    "mat": ("verified", "rounds", 1.0),
    "server_ms_per_token": ("server_ms", "tokens", 1.0),
    "delivery_tokens_per_s": ("tokens", "ms", MS_PER_S),
    "draft_ms_per_token": ("draft_ms", "tokens", 1.0),
}
SERVER_TIME = "server_ms_per_token"


class Interval(msgspec.Struct, frozen=True):
    """95 % of the draws lie between them."""

    low: float
    high: float


def prompt_sums(traces: Sequence[GenerationTrace]) -> dict[str, np.ndarray]:
    """[PARTS] by question, counted as `metrics.measure` counts them."""
    grouped: dict[str, list[GenerationTrace]] = {}
    for trace in traces:
        grouped.setdefault(trace.prompt_id.partition(TURN_MARK)[0], []).append(trace)
    return {question: _sums(found) for question, found in grouped.items()}


def _sums(traces: Sequence[GenerationTrace]) -> np.ndarray:
    timed = timed_steps(traces)
    rounds = [record for trace in traces for record in trace.rounds]
    local_ms = sum(record.draft_ms for trace in traces for record in trace.locals)
    return np.array(
        [
            sum(len(record.tokens) for record in rounds),
            len(rounds),
            sum(call.server_ms for call in timed.primes) + sum(call.server_ms for call in timed.rounds),
            timed.tokens,
            sum(record.draft_ms + record.ahead_ms for record in timed.rounds) + local_ms,
            timed.ms,
        ]
    )


def ratio_intervals(sums: Mapping[str, np.ndarray]) -> dict[str, Interval]:
    """The interval of every measure of RATIOS; none for a single prompt, or where nothing was measured."""
    drawn = _drawn([sums[question] for question in sorted(sums)])
    if drawn is None:
        return {}
    found = {name: _interval(_ratio(drawn, name)) for name in RATIOS}
    return {name: interval for name, interval in found.items() if interval is not None}


def change_interval(sums: Mapping[str, np.ndarray], baseline: Mapping[str, np.ndarray]) -> Interval | None:
    """The interval of the relative change of the server's time per token, paired: both systems on the same draws of the
    prompts that both answered."""
    common = sorted(sums.keys() & baseline.keys())
    drawn = _drawn([np.stack([sums[question], baseline[question]]) for question in common])
    if drawn is None:
        return None
    return _interval(_ratio(drawn[:, 0], SERVER_TIME) / _ratio(drawn[:, 1], SERVER_TIME) - 1)


def _drawn(values: Sequence[np.ndarray]) -> np.ndarray | None:
    """[DRAWS, ...] sums over prompts drawn with replacement; None for fewer than two prompts."""
    if len(values) < LEAST_PAIRS:
        return None
    return np.tensordot(draw_counts(len(values)), np.stack(values), axes=1)


def _ratio(drawn: np.ndarray, name: str) -> np.ndarray:
    above, below, factor = RATIOS[name]
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(factor * drawn[..., PARTS.index(above)] / drawn[..., PARTS.index(below)])


def _interval(values: np.ndarray) -> Interval | None:
    if not np.isfinite(values).all():
        return None
    low, high = interval_ends(values)
    return Interval(float(low), float(high))
