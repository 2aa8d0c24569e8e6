"""p~ against transformers' logits warpers, and the draws' independence of everything but their key."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from hyco_export.protocol.sampling import Support, draws, invert, node_probabilities, sampling_support, uniforms
from hyco_export.protocol.wire import PAPER_SAMPLING, Sampling
from tests.support.dense import sampling_distribution

SETTINGS = (
    Sampling(1.0, 64, 0.95),
    Sampling(0.7, 64, 0.95),
    Sampling(1.3, 5, 1.0),
    Sampling(1.0, 0, 0.9),
    Sampling(0.35, 0, 1.0),
    Sampling(2.0, 7, 0.05),
)


def warped(logits: np.ndarray, sampling: Sampling) -> torch.Tensor:
    """What `generate` samples from: scores [R, V] with -inf where a token is cut, in the warpers' order."""
    scores = torch.from_numpy(logits.copy())
    warpers = []
    if sampling.temperature != 1.0:
        warpers.append(TemperatureLogitsWarper(sampling.temperature))
    if sampling.top_k:
        warpers.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1.0:
        warpers.append(TopPLogitsWarper(sampling.top_p))
    for warper in warpers:
        scores = warper(torch.zeros(len(logits), 1, dtype=torch.long), scores)
    return scores


def assert_equal_to_warpers(logits: np.ndarray, sampling: Sampling) -> None:
    expected = warped(logits, sampling)
    likely = expected.softmax(-1).numpy()
    ours = sampling_distribution(logits, sampling)
    normal = np.float32(1e-37)  # torch keeps denormal probabilities, float64 rounds some of them to 0
    assert np.array_equal(ours > normal, likely > normal)
    scaled = logits / np.float32(sampling.temperature)
    assert np.array_equal(scaled[ours > 0], expected.numpy()[ours > 0])  # bit for bit
    np.testing.assert_allclose(ours, likely, rtol=1e-6, atol=normal)


@pytest.mark.parametrize("sampling", SETTINGS)
@pytest.mark.parametrize("spread", [0.5, 3.0, 9.0])
def test_tokens_and_scores_equal_transformers_warpers(sampling: Sampling, spread: float) -> None:
    logits = np.random.default_rng(1).normal(0, spread, (400, 300)).astype(np.float32)
    assert_equal_to_warpers(logits, sampling)


@pytest.mark.parametrize("sampling", SETTINGS)
def test_as_many_of_each_score_stay_as_in_transformers_when_scores_tie(sampling: Sampling) -> None:
    # logits on a coarse grid: ties at the k-th place and at the top-p edge in most rows. Which of equal tokens
    # stays at the top-p edge is left to torch's unstable sort there; here it is the largest ids.
    logits = np.random.default_rng(2).integers(-4, 5, (400, 90)).astype(np.float32)
    expected = warped(logits, sampling).softmax(-1).numpy()
    ours = sampling_distribution(logits, sampling)
    np.testing.assert_allclose(np.sort(ours, axis=1), np.sort(expected, axis=1), rtol=1e-6, atol=1e-37)
    for row, probs in zip(logits, ours, strict=True):
        for level in set(row[probs > 0]):
            tied = probs[row == level] > 0
            assert tied.all() or sampling.top_p < 1.0
            assert tied.tolist() == sorted(tied.tolist())  # False before True: the largest ids


def test_ties_with_the_kth_logit_stay_and_rows_may_differ_in_width() -> None:
    logits = np.array([[3, 2, 2, 2, 1], [5, 4, 3, 2, 1]], np.float32)
    support = sampling_support(logits, Sampling(1.0, 2, 1.0))
    assert (support.probs > 0).sum(axis=1).tolist() == [4, 2]
    assert support.ids[0].tolist() == [0, 1, 2, 3]
    assert support.ids[1, :2].tolist() == [0, 1]


def test_at_least_one_token_stays() -> None:
    logits = np.array([[0.0, 4.0, 1.0]], np.float32)
    assert sampling_distribution(logits, Sampling(1.0, 0, 1e-6)).tolist() == [[0, 1, 0]]


def test_top_p_cuts_the_unlikely_tail_not_the_head() -> None:
    logits = np.log(np.array([[0.5, 0.3, 0.15, 0.05]], np.float32))
    kept = sampling_distribution(logits, Sampling(1.0, 0, 0.7))
    np.testing.assert_allclose(kept, [[0.625, 0.375, 0, 0]], rtol=1e-6)


def test_greedy_is_one_hot_at_the_argmax() -> None:
    logits = np.random.default_rng(3).normal(size=(6, 40)).astype(np.float32)
    rows = sampling_distribution(logits, Sampling(0.0, 64, 0.95))
    assert np.array_equal(rows.argmax(1), logits.argmax(1))
    assert np.array_equal(rows.max(1), np.ones(6)) and np.array_equal(rows.sum(1), np.ones(6))


@pytest.mark.parametrize("bad", [np.nan, -np.inf])
def test_rows_without_a_finite_logit_are_refused(bad: float) -> None:
    logits = np.zeros((2, 5), np.float32)
    logits[1] = bad
    with pytest.raises(ValueError, match=r"rows \[1\] of the logits are not finite"):
        sampling_distribution(logits, PAPER_SAMPLING)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from(SETTINGS), st.integers(1, 12))
def test_a_row_does_not_depend_on_the_rows_beside_it(seed: int, sampling: Sampling, rows: int) -> None:
    logits = np.random.default_rng(seed).integers(-9, 9, (rows, 30)).astype(np.float32)
    together = sampling_distribution(logits, sampling)
    for row in range(rows):
        assert np.array_equal(sampling_distribution(logits[row : row + 1], sampling)[0], together[row])


def test_draws_depend_on_seed_position_and_row_alone() -> None:
    positions = np.array([7, 8, 8, 9, 8])
    numbers = uniforms(5, positions)
    assert np.array_equal(uniforms(5, positions), numbers)
    assert np.array_equal(uniforms(5, positions[:3]), numbers[:3])
    moved = uniforms(5, np.array([7, 8, 9, 9, 8]))
    assert (moved == numbers).tolist() == [True, True, False, True, True]
    assert not np.any(uniforms(6, positions) == numbers)
    assert len(set(numbers.tolist())) == 5


def test_uniforms_are_uniform_and_independent_between_rows_positions_and_seeds() -> None:
    table = np.array([uniforms(seed, np.array([40, 41, 41, 42])) for seed in range(20_000)])  # [seeds, rows]
    for column in table.T:
        assert stats.kstest(column, "uniform").pvalue > 1e-4
    cells = (table * 4).astype(int)
    for left, right in ((0, 1), (1, 2), (2, 3)):
        counts = np.bincount(cells[:, left] * 4 + cells[:, right], minlength=16)
        assert stats.chisquare(counts).pvalue > 1e-4
    successive = (table[:-1, 0] * 4).astype(int) * 4 + (table[1:, 0] * 4).astype(int)
    assert stats.chisquare(np.bincount(successive, minlength=16)).pvalue > 1e-4


def test_largest_seed_and_position_are_keys_too() -> None:
    numbers = uniforms(2**64 - 1, np.array([2**31, 2**31]))
    assert np.all((numbers >= 0) & (numbers < 1)) and numbers[0] != numbers[1]


def test_inversion_walks_the_cumulative_distribution_and_skips_cut_tokens() -> None:
    support = Support(np.array([[2, 5, 7, 0]]).repeat(6, 0), np.array([[0.25, 0, 0.75, 0]], np.float32).repeat(6, 0))
    numbers = np.array([0.0, 0.2499, 0.25, 0.5, 0.9999, 1.0])  # 1.0 never comes; it must not leave the support
    assert invert(support, numbers).tolist() == [2, 2, 7, 7, 7, 7]


def test_draws_follow_the_distribution() -> None:
    logits = np.random.default_rng(4).normal(0, 1.5, (1, 12)).astype(np.float32)
    sampling = Sampling(1.0, 8, 0.9)
    p = sampling_distribution(logits, sampling)[0].astype(np.float64)
    support = sampling_support(logits, sampling)
    seen = np.array([draws(support, seed, np.array([3]))[0] for seed in range(20_000)])
    counts = np.bincount(seen, minlength=12)
    assert counts[p == 0].sum() == 0
    assert stats.chisquare(counts[p > 0], 20_000 * p[p > 0] / p.sum()).pvalue > 1e-4


def test_node_probabilities_read_the_parents_row() -> None:
    logits = np.random.default_rng(5).normal(size=(4, 9)).astype(np.float32)
    sampling = Sampling(1.0, 4, 1.0)
    p = sampling_distribution(logits, sampling)
    tokens, parents = [3, 0, 8], [-1, 0, 0]
    expected = [p[0, 3], p[1, 0], p[1, 8]]
    assert node_probabilities(sampling_support(logits, sampling), tokens, parents).tolist() == expected
    assert node_probabilities(sampling_support(logits, sampling), [], []).shape == (0,)
