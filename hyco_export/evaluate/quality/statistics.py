"""Paired percentile bootstrap over questions, as in HyCo's Appendix E.

2,000 draws whose generator starts anew with every contrast, so that a contrast does not depend on which were worked out
before it. A draw takes n of n questions with replacement, the same ones for both systems. It is kept as how often each
question was taken: sums over a draw are then one matrix product, also for a thousand data sets at once.

The intervals are conditional on the answers at hand. They hold the variation between questions alone, not that of
other generations, other judgements or other deployments.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

DRAWS = 2_000
SEED = 20_261_011
CONFIDENCE = 0.95
LEAST_PAIRS = 2  # one question alone has no variation


class Interval(NamedTuple):
    """An estimate between the ends of its confidence interval; arrays where several data sets were given at once."""

    estimate: np.ndarray | float
    low: np.ndarray | float
    high: np.ndarray | float


@lru_cache(maxsize=8)
def draw_counts(questions: int) -> np.ndarray:
    """How often each draw takes each question, (DRAWS, questions) in float64; a row sums to `questions`."""
    taken = np.random.default_rng(SEED).integers(0, questions, (DRAWS, questions))
    first_cell = np.arange(DRAWS)[:, None] * questions  # of the draw's row in the flat table
    counts = np.bincount((taken + first_cell).ravel(), minlength=DRAWS * questions)
    return counts.reshape(DRAWS, questions).astype(np.float64)


def mean_difference(system: np.ndarray, baseline: np.ndarray) -> Interval:
    """Mean over questions of system minus baseline.

    Args:
        system: a value a question, (questions,), or (questions, data sets).
        baseline: the same of the baseline, questions in the same order.

    Raises:
        ValueError: other shapes, or fewer than LEAST_PAIRS questions.
    """
    _require_pairs(system, baseline)
    difference = system - baseline
    return Interval(
        difference.mean(axis=0), *interval_ends(draw_counts(len(difference)) @ difference / len(difference))
    )


def ratio_change(
    system_ms: np.ndarray, system_tokens: np.ndarray, baseline_ms: np.ndarray, baseline_tokens: np.ndarray
) -> Interval:
    """Relative change of g, pooled time over pooled tokens: sums are taken before they are divided, in every draw too,
    and -0.386 is 38.6 % less. Long answers weigh more; it is not the mean of the questions' own changes.

    Args:
        system_ms: a value a question, (questions,), or (questions, data sets); so are the others.

    Raises:
        ValueError: other shapes, or fewer than LEAST_PAIRS questions.
    """
    _require_pairs(system_ms, system_tokens, baseline_ms, baseline_tokens)

    def change(sums: Sequence[np.ndarray]) -> np.ndarray:
        ms, tokens, other_ms, other_tokens = sums
        return np.asarray((ms / tokens) / (other_ms / other_tokens) - 1.0)

    parts = (system_ms, system_tokens, baseline_ms, baseline_tokens)
    counts = draw_counts(len(system_ms))
    sums = [part.sum(axis=0) for part in parts]
    return Interval(change(sums), *interval_ends(change([counts @ part for part in parts])))


def sample_sd(values: Sequence[float]) -> float | None:
    """Sample standard deviation, of run-level values; None for fewer than two."""
    return float(np.std(values, ddof=1)) if len(values) > 1 else None


def interval_ends(draws: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The percentile interval of `draws`, (DRAWS, ...); numpy's linear interpolation between order statistics."""
    tail = (1.0 - CONFIDENCE) / 2.0
    low, high = np.quantile(draws, (tail, 1.0 - tail), axis=0)
    return low, high


def _require_pairs(*parts: np.ndarray) -> None:
    shapes = sorted({part.shape for part in parts})
    if len(shapes) > 1:
        raise ValueError(f"values of the same questions have shapes {shapes}")
    if shapes[0][0] < LEAST_PAIRS:
        raise ValueError(f"{shapes[0][0]} questions have no interval, the least is {LEAST_PAIRS}")
