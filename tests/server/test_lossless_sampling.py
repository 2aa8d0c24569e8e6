"""`exact` in sampling mode commits what plain sampling would: a distribution test with controls that must fail it.

Legend: V vocabulary, N nodes, T trials. A toy context is the tuple of tokens after the root; p~ of a context is fixed.
"""

import math
from collections.abc import Callable, Sequence
from functools import cache

import numpy as np
import pytest
from scipy import stats

from hyco_export.protocol import acceptance
from hyco_export.protocol.acceptance import Judged, Verdict
from hyco_export.protocol.sampling import Support, invert, sampling_support, uniforms
from hyco_export.protocol.tree import ROOT, check_tree, depths, path_to
from hyco_export.protocol.wire import Sampling
from tests.support.dense import sampling_distribution

VOCAB = 8
TRIALS = 100_000
COMPARED = 3  # first tokens compared jointly
ALPHA = 1e-4
MIN_EXPECTED = 5.0  # of a chi-square cell; rarer outcomes are pooled
SAMPLING = Sampling(1.0, 6, 0.95)

Shape = tuple[tuple[int, ...], tuple[int, ...]]
CHAIN: Shape = ((0, 1, 2, 3), (ROOT, 0, 1, 2))
STAR: Shape = ((5, 1, 3), (ROOT, ROOT, ROOT))
FULL_WIDTH: Shape = (
    tuple(range(VOCAB)) + tuple(range(VOCAB)),
    (ROOT,) * VOCAB + (2,) * VOCAB,
)
REPEATED: Shape = ((1, 2, 1, 2, 1, 2, 3), (ROOT, ROOT, 0, 0, 1, 1, 2))  # equal tokens under different parents
LIKELY: Shape = ((6, 4, 6, 4, 6, 4), (ROOT, ROOT, 0, 0, 1, 1))
TREES = {"empty": ((), ()), "chain": CHAIN, "star": STAR, "full width": FULL_WIDTH, "repeated": REPEATED}


@cache
def logits_of(context: tuple[int, ...]) -> np.ndarray:
    """Logits [V] after a context."""
    seed = sum((token + 1) * 31**place for place, token in enumerate(context))
    return np.random.default_rng(seed).normal(0, 1.2, VOCAB).astype(np.float32)


@cache
def p_of(context: tuple[int, ...]) -> np.ndarray:
    """p~ [V] after a context."""
    return sampling_distribution(logits_of(context)[None], SAMPLING)[0].astype(np.float64)


def contexts(tree: Shape) -> list[tuple[int, ...]]:
    """The context of every row: root, node 0, ..."""
    tokens, parents = tree
    return [tuple(tokens[node] for node in path_to(parents, row)) for row in (ROOT, *range(len(tokens)))]


def row_draws(
    tree: Shape, generator: np.random.Generator, p: Callable[[tuple[int, ...]], np.ndarray] = p_of
) -> np.ndarray:
    """draws [T, N + 1], one per row and trial."""
    columns = []
    for context in contexts(tree):
        row = p(context)
        support = Support(np.arange(VOCAB)[None], row[None].astype(np.float32))
        tiled = Support(np.broadcast_to(support.ids, (TRIALS, VOCAB)), np.broadcast_to(support.probs, (TRIALS, VOCAB)))
        columns.append(invert(tiled, generator.random(TRIALS)))
    return np.stack(columns, axis=1)


def first_tokens(committed: Sequence[Sequence[int]], generator: np.random.Generator) -> np.ndarray:
    """Outcome [T] of every trial: its first COMPARED tokens as one number, continued by plain sampling."""
    numbers = generator.random((len(committed), COMPARED))
    outcomes = np.empty(len(committed), np.int64)
    for trial, tokens in enumerate(committed):
        context = list(tokens[:COMPARED])
        while len(context) < COMPARED:
            number = numbers[trial, len(context)]
            context.append(int(np.searchsorted(cumulative_of(tuple(context)), number, side="right")))
        outcomes[trial] = (context[0] * VOCAB + context[1]) * VOCAB + context[2]
    return outcomes


@cache
def cumulative_of(context: tuple[int, ...]) -> np.ndarray:
    p = p_of(context)
    cumulative = np.cumsum(p / p.sum())
    cumulative[np.flatnonzero(p)[-1] :] = math.nextafter(1.0, 2.0)
    return cumulative


@cache
def expected_outcomes() -> np.ndarray:
    """Exact probabilities [V^3] of the first three tokens under plain sampling."""
    table = np.zeros((VOCAB, VOCAB, VOCAB))
    for first in range(VOCAB):
        for second in range(VOCAB):
            table[first, second] = p_of(())[first] * p_of((first,))[second] * p_of((first, second))
    return table.ravel() / table.sum()


def compare(outcomes: np.ndarray) -> tuple[float, float]:
    """p-value of the chi-square test and total variation against plain sampling."""
    expected = expected_outcomes() * len(outcomes)
    counts = np.bincount(outcomes, minlength=VOCAB**COMPARED).astype(np.float64)
    if counts[expected == 0].sum():
        return 0.0, 0.5 * float(np.abs(counts - expected).sum() / len(outcomes))
    rare = expected < MIN_EXPECTED
    kept = [counts[~rare], expected[~rare]]
    if expected[rare].sum() > 0:
        kept = [np.append(kept[0], counts[rare].sum()), np.append(kept[1], expected[rare].sum())]
    variation = 0.5 * float(np.abs(counts - expected).sum() / len(outcomes))
    return float(stats.chisquare(*kept).pvalue), variation


def judge_all(tree: Shape, draws: np.ndarray, rule: Callable[[list[int]], Verdict]) -> list[list[int]]:
    """Committed tokens of every trial; equal rows of draws are judged once."""
    tokens, _ = tree
    distinct, inverse = np.unique(draws, axis=0, return_inverse=True)
    verdicts = [rule(row) for row in distinct.tolist()]
    committed = [[*(tokens[row] for row in verdict.accepted), verdict.bonus] for verdict in verdicts]
    return [committed[index] for index in inverse.ravel()]


def noise(trials: int) -> float:
    """Total variation that sampling noise alone explains: its mean plus a half."""
    p = expected_outcomes()
    return 1.5 * float(np.sqrt(2 * p * (1 - p) / (math.pi * trials)).sum() / 2)


@pytest.mark.parametrize("name", TREES)
def test_exact_commits_what_plain_sampling_would(name: str) -> None:
    tree = TREES[name]
    tokens, parents = tree
    check_tree(tokens, parents, VOCAB, 64)
    generator = np.random.default_rng(20261011)
    committed = judge_all(
        tree, row_draws(tree, generator), lambda draws: acceptance.exact(Judged(tokens, parents, draws))
    )
    p_value, variation = compare(first_tokens(committed, generator))
    assert p_value > ALPHA, f"{name}: p = {p_value:.2e}, total variation {variation:.4f}"
    assert variation < noise(TRIALS)
    if name != "empty":
        assert np.mean([len(path) for path in committed]) > 1.05  # the tree did take part


def test_exact_with_the_engines_own_draws() -> None:
    tree = LIKELY
    tokens, parents = tree
    support = sampling_support(np.stack([logits_of(context) for context in contexts(tree)]), SAMPLING)
    positions = 11 + np.concatenate([[0], depths(parents)])
    trials = TRIALS // 4
    numbers = np.array([uniforms(seed, positions) for seed in range(trials)])  # [T, N + 1]
    columns = [
        invert(
            Support(
                np.broadcast_to(support.ids[row], (trials, support.ids.shape[1])),
                np.broadcast_to(support.probs[row], (trials, support.ids.shape[1])),
            ),
            numbers[:, row],
        )
        for row in range(len(positions))
    ]
    draws = np.stack(columns, axis=1)
    committed = judge_all(tree, draws, lambda row: acceptance.exact(Judged(tokens, parents, row)))
    p_value, variation = compare(first_tokens(committed, np.random.default_rng(3)))
    assert p_value > ALPHA and variation < noise(trials)


def assert_detected(committed: Sequence[Sequence[int]], generator: np.random.Generator) -> None:
    p_value, variation = compare(first_tokens(committed, generator))
    assert p_value < ALPHA, f"a wrong rule passed: p = {p_value:.2e}, total variation {variation:.4f}"


def test_control_independent_draws_per_path_fail() -> None:
    # every leaf draws its own tokens along its path; the longest path that agrees with its draws wins
    tokens, parents = LIKELY
    leaves = [row for row in range(len(tokens)) if row not in parents]
    generator = np.random.default_rng(1)
    own = {leaf: row_draws(LIKELY, generator) for leaf in leaves}
    committed = []
    for trial in range(TRIALS):
        best: list[int] = []
        for leaf in leaves:
            draws = own[leaf][trial]
            path = path_to(parents, leaf)
            agreed = next((n for n, row in enumerate(path) if tokens[row] != draws[parents[row] + 1]), len(path))
            end = path[agreed - 1] if agreed else ROOT
            reached = [*(tokens[row] for row in path[:agreed]), int(draws[end + 1])]
            best = max(best, reached, key=len)
        committed.append(best)
    assert_detected(committed, generator)


def test_control_duplicate_siblings_fail() -> None:
    # the same token twice under the root, each copy with its own child: the deeper copy is preferred
    tree: Shape = ((6, 6, 6, 4), (ROOT, ROOT, 0, 1))
    tokens, parents = tree
    generator = np.random.default_rng(2)
    probs = np.full(len(tokens), 0.5, np.float32)
    draws = row_draws(tree, generator)
    committed = judge_all(tree, draws, lambda row: acceptance.epsilon(Judged(tokens, parents, row, probs), 1.0))
    assert_detected(committed, generator)


def test_control_inverted_top_p_fails() -> None:
    def inverted(context: tuple[int, ...]) -> np.ndarray:
        p = np.exp(logits_of(context).astype(np.float64))
        p /= p.sum()
        order = np.argsort(p)  # keeps the least likely tokens up to the mass instead of the likeliest
        kept = np.zeros(VOCAB, bool)
        kept[order[: int(np.searchsorted(np.cumsum(p[order]), SAMPLING.top_p)) + 1]] = True
        return np.where(kept, p, 0) / p[kept].sum()

    tokens, parents = LIKELY
    generator = np.random.default_rng(4)
    draws = row_draws(LIKELY, generator, inverted)
    assert_detected(judge_all(LIKELY, draws, lambda row: acceptance.exact(Judged(tokens, parents, row))), generator)


def test_control_epsilon_above_zero_fails() -> None:
    tokens, parents = LIKELY
    generator = np.random.default_rng(5)
    probs = np.array([p_of(contexts(LIKELY)[p + 1])[t] for t, p in zip(tokens, parents, strict=True)], np.float32)
    draws = row_draws(LIKELY, generator)
    committed = judge_all(LIKELY, draws, lambda row: acceptance.epsilon(Judged(tokens, parents, row, probs), 0.005))
    assert_detected(committed, generator)
