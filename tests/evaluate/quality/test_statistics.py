"""The bootstrap beside scipy's, its coverage on data whose truth is known, and what it refuses."""

from collections.abc import Callable

import numpy as np
import pytest
from scipy import stats

from hyco_export.evaluate.quality.statistics import (
    CONFIDENCE,
    DRAWS,
    SEED,
    Interval,
    draw_counts,
    mean_difference,
    ratio_change,
    sample_sd,
)

REPETITIONS = 1_000  # data sets
QUESTIONS = 398  # of the paper's judged answers


def scipy_interval(data: tuple[np.ndarray, ...], statistic: Callable[..., np.ndarray]) -> tuple[float, float]:
    """Another implementation, fed with the same generator."""
    found = stats.bootstrap(
        data,
        statistic,
        paired=True,
        vectorized=True,
        n_resamples=2_000,
        confidence_level=0.95,
        method="percentile",
        rng=np.random.default_rng(20_261_011),
    )
    return found.confidence_interval


def covered(found: Interval, truth: float) -> float:
    """The share of data sets whose interval holds the truth; shown by `pytest -rP`, for docs/results.md."""
    share = float(np.mean((found.low <= truth) & (truth <= found.high)))
    print(f"{share:.1%} of {REPETITIONS:,} intervals hold the truth")
    return share


def test_the_constants_are_the_papers() -> None:
    assert (DRAWS, SEED, CONFIDENCE) == (2_000, 20_261_011, 0.95)


@pytest.mark.parametrize("questions", [2, 17, QUESTIONS])
def test_a_mean_difference_is_scipys(questions: int) -> None:
    random = np.random.default_rng(1)
    system, baseline = random.uniform(0, 100, (2, questions))
    found = mean_difference(system, baseline)
    expected = scipy_interval((system, baseline), lambda x, y, axis: np.mean(x, axis=axis) - np.mean(y, axis=axis))
    np.testing.assert_allclose((found.low, found.high), expected, rtol=1e-10, atol=1e-12)
    assert found.estimate == pytest.approx(np.mean(system) - np.mean(baseline))


def test_a_change_of_g_is_scipys_with_sums_in_every_draw() -> None:
    random = np.random.default_rng(2)
    tokens, other_tokens = random.integers(5, 1_000, (2, 80)).astype(float)
    ms, other_ms = 500 + tokens * random.uniform(3, 6, 80), other_tokens * random.uniform(6, 9, 80)  # dear when short

    def change(a: np.ndarray, b: np.ndarray, c: np.ndarray, d: np.ndarray, axis: int) -> np.ndarray:
        return a.sum(axis) / b.sum(axis) / (c.sum(axis) / d.sum(axis)) - 1

    found = ratio_change(ms, tokens, other_ms, other_tokens)
    expected = scipy_interval((ms, tokens, other_ms, other_tokens), change)
    np.testing.assert_allclose((found.low, found.high), expected, rtol=1e-10)
    assert found.estimate == pytest.approx(change(ms, tokens, other_ms, other_tokens, axis=0))
    assert np.mean(ms / tokens / (other_ms / other_tokens) - 1) > found.high


@pytest.mark.parametrize("seed", [1, 2])
def test_intervals_of_a_mean_cover_the_truth_as_often_as_they_say(seed: int) -> None:
    random, truth = np.random.default_rng(seed), 1.5
    difficulty = random.gamma(2.0, 10.0, (QUESTIONS, REPETITIONS))  # skewed, and common to both systems
    noise, other_noise = random.standard_t(5, (2, QUESTIONS, REPETITIONS)) * 8.0
    share = covered(mean_difference(90 - difficulty + truth + noise, 90 - difficulty + other_noise), truth)
    assert 0.93 <= share <= 0.97


@pytest.mark.parametrize("seed", [1, 2])
def test_intervals_of_g_cover_the_truth_as_often_as_they_say(seed: int) -> None:
    random, shape = np.random.default_rng(seed), (QUESTIONS, REPETITIONS)
    tokens, other_tokens = random.lognormal(5.0, 0.7, (2, *shape))  # answers of very different lengths
    noise, other_noise = random.gamma(20.0, 1 / 20.0, (2, *shape))  # of mean 1
    found = ratio_change(tokens * 5.0 * noise, tokens, other_tokens * 8.0 * other_noise, other_tokens)
    assert 0.93 <= covered(found, 5.0 / 8.0 - 1) <= 0.97


def test_pairs_are_kept_together() -> None:
    """What is common to both systems leaves no trace in the interval, however large it is."""
    random = np.random.default_rng(3)
    difference, common = random.normal(0, 1, 50), random.normal(0, 1e3, 50)
    alone, together = mean_difference(difference, np.zeros(50)), mean_difference(common + difference, common)
    np.testing.assert_allclose(together, alone, atol=1e-9)


def test_a_contrast_does_not_depend_on_those_before_it() -> None:
    values = np.random.default_rng(4).normal(0, 1, (2, 30))
    first = mean_difference(*values)
    draw_counts.cache_clear()
    mean_difference(*np.random.default_rng(5).normal(0, 1, (2, 31)))
    np.testing.assert_array_equal(mean_difference(*values), first)


def test_every_draw_takes_as_many_questions_as_there_are() -> None:
    counts = draw_counts(7)
    assert counts.shape == (2_000, 7) and (counts.sum(axis=1) == 7).all()
    assert counts.max() > 1 and counts.min() == 0


def test_what_cannot_be_paired_is_refused() -> None:
    with pytest.raises(ValueError, match=r"shapes \[\(3,\), \(4,\)\]"):
        mean_difference(np.zeros(3), np.zeros(4))
    with pytest.raises(ValueError, match="1 questions have no interval, the least is 2"):
        ratio_change(*np.ones((4, 1)))


def test_the_sd_of_runs_is_the_samples() -> None:
    assert sample_sd([1.0, 2.0, 4.0]) == pytest.approx(1.527525, abs=1e-6)
    assert sample_sd([1.0]) is None and sample_sd([]) is None
