"""Acceptance rules against their definitions, on random trees."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from hyco_export.protocol import acceptance
from hyco_export.protocol.acceptance import Judged
from hyco_export.protocol.tree import ROOT, check_tree, depths, path_to

VOCAB = 6


@st.composite
def rounds(draw: st.DrawFn, greedy: bool = False) -> tuple[list[int], list[int], list[int], np.ndarray, np.ndarray]:
    """tokens [N], parents [N], draws [N + 1], p~ rows [N + 1, V], probs [N] of a random tree; every draw has mass."""
    edges = draw(st.lists(st.tuples(st.integers(0, 10), st.integers(0, VOCAB - 1)), max_size=11))
    tokens: list[int] = []
    parents: list[int] = []
    for wanted, token in edges:
        parent = wanted % (len(tokens) + 1) - 1
        if (parent, token) not in zip(parents, tokens, strict=True):
            tokens.append(token)
            parents.append(parent)
    generator = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    rows = generator.dirichlet(np.full(VOCAB, 0.5), len(tokens) + 1).astype(np.float32)
    rows[rows < 0.05] = 0  # cut tokens
    if greedy:
        rows = np.eye(VOCAB, dtype=np.float32)[rows.argmax(1)]
    rows /= rows.sum(axis=1, keepdims=True)
    draws = [int(generator.choice(np.flatnonzero(row))) for row in rows]
    probs = np.array([rows[parent + 1, token] for token, parent in zip(tokens, parents, strict=True)], np.float32)
    check_tree(tokens, parents, VOCAB, 64)
    return tokens, parents, draws, rows, probs


def brute_force(
    tokens: list[int], parents: list[int], draws: list[int], probs: np.ndarray, eps: float
) -> tuple[int, ...]:
    """The best path over all nodes, each judged edge by edge."""
    candidates = []
    for row in [ROOT, *range(len(tokens))]:
        path = path_to(parents, row)
        drawn = [tokens[node] == draws[parents[node] + 1] for node in path]
        if all(match or probs[node] >= np.float32(eps) for node, match in zip(path, drawn, strict=True)):
            log_prob = math.fsum(math.log(probs[node]) for node in path)
            candidates.append(((len(path), sum(drawn), round(log_prob, 9), -row), path))
    return max(candidates)[1]


@settings(max_examples=300, deadline=None)
@given(rounds())
def test_exact_follows_the_draws_and_stops_where_no_child_equals_them(case: tuple) -> None:
    tokens, parents, draws, _, _ = case
    verdict = acceptance.exact(Judged(tokens, parents, draws))
    at = ROOT
    for row in verdict.accepted:
        assert parents[row] == at and tokens[row] == draws[at + 1]
        at = row
    assert verdict.bonus == draws[at + 1]
    assert not any(parents[row] == at and tokens[row] == verdict.bonus for row in range(len(tokens)))
    assert verdict.drawn == (True,) * len(verdict.accepted)


@settings(max_examples=300, deadline=None)
@given(rounds())
def test_epsilon_of_one_is_exact(case: tuple) -> None:
    tokens, parents, draws, rows, probs = case
    assume(rows.max() < 1.0)
    assert acceptance.epsilon(Judged(tokens, parents, draws, probs), 1.0) == acceptance.exact(
        Judged(tokens, parents, draws)
    )


@settings(max_examples=300, deadline=None)
@given(rounds(greedy=True), st.sampled_from([1e-6, 0.005, 0.5, 1.0]))
def test_epsilon_adds_nothing_to_greedy(case: tuple, eps: float) -> None:
    tokens, parents, draws, _, probs = case
    assert acceptance.epsilon(Judged(tokens, parents, draws, probs), eps) == acceptance.exact(
        Judged(tokens, parents, draws)
    )


@settings(max_examples=500, deadline=None)
@given(rounds(), st.sampled_from([0.06, 0.15, 0.3, 0.6]))
def test_epsilon_takes_the_best_path_of_all(case: tuple, eps: float) -> None:
    tokens, parents, draws, _, probs = case
    verdict = acceptance.epsilon(Judged(tokens, parents, draws, probs), eps)
    best = brute_force(tokens, parents, draws, probs, eps)
    assert verdict.accepted == best
    end = best[-1] if best else ROOT
    assert verdict.bonus == draws[end + 1]
    assert verdict.drawn == tuple(tokens[row] == draws[parents[row] + 1] for row in best)


@settings(max_examples=200, deadline=None)
@given(rounds(), st.sampled_from([0.06, 0.3]))
def test_epsilon_never_commits_less_than_exact(case: tuple, eps: float) -> None:
    tokens, parents, draws, _, probs = case
    exact = acceptance.exact(Judged(tokens, parents, draws))
    relaxed = acceptance.epsilon(Judged(tokens, parents, draws, probs), eps)
    assert len(relaxed.accepted) >= len(exact.accepted)


def test_the_order_of_choice_is_depth_then_draws_then_log_prob_then_row() -> None:
    draws = [0, 9, 9, 9, 9, 9]
    roots = [ROOT, ROOT, ROOT]
    # depth first: row 3 hangs under row 2, though row 0 equals the draw
    chosen = acceptance.epsilon(
        Judged([0, 1, 2, 5], [*roots, 2], draws, np.array([0.5, 0.2, 0.2, 0.2], np.float32)), 0.1
    )
    assert chosen == acceptance.Verdict((2, 3), (False, False), 9)
    # equal depth: the drawn child, though another is likelier
    assert acceptance.epsilon(Judged([0, 1, 2], roots, draws, np.array([0.2, 0.6, 0.2], np.float32)), 0.1).accepted == (
        0,
    )
    # no drawn child: the likeliest
    assert acceptance.epsilon(Judged([3, 1, 2], roots, draws, np.array([0.2, 0.2, 0.6], np.float32)), 0.1).accepted == (
        2,
    )
    # all equal: the smallest row
    assert acceptance.epsilon(Judged([3, 1, 2], roots, draws, np.array([0.2, 0.2, 0.2], np.float32)), 0.1).accepted == (
        0,
    )


def test_the_threshold_itself_is_enough() -> None:
    at = np.float32(0.005)
    below = np.nextafter(at, np.float32(0))
    assert acceptance.epsilon(Judged([1], [ROOT], [0, 2], np.array([at])), 0.005) == acceptance.Verdict(
        (0,), (False,), 2
    )
    assert acceptance.epsilon(Judged([1], [ROOT], [0, 2], np.array([below])), 0.005) == acceptance.Verdict((), (), 0)


def test_an_unreachable_node_is_never_taken() -> None:
    # row 1 is likely, its parent is not acceptable
    verdict = acceptance.epsilon(Judged([1, 2], [ROOT, 0], [0, 5, 5], np.array([0.01, 0.9], np.float32)), 0.1)
    assert verdict == acceptance.Verdict((), (), 0)


def test_an_empty_tree_commits_the_draw() -> None:
    empty = np.zeros(0, np.float32)
    assert acceptance.exact(Judged([], [], [4])) == acceptance.Verdict((), (), 4)
    assert acceptance.epsilon(Judged([], [], [4], empty), 0.1) == acceptance.Verdict((), (), 4)


@pytest.mark.parametrize("eps", [0.0, -0.1, 1.1, math.nan])
def test_epsilon_must_lie_in_the_unit_interval(eps: float) -> None:
    with pytest.raises(ValueError, match=r"epsilon is .*, it must lie in \(0, 1\]"):
        acceptance.epsilon(Judged([1], [ROOT], [1, 1], np.array([0.5], np.float32)), eps)


def test_the_full_binary_tree_offers_every_path() -> None:
    # all draws of a depth-3 binary tree lead to the leaf that spells them
    tokens, parents = [], []
    for row in range(14):
        tokens.append(row % 2)
        parents.append((row - 2) // 2 if row >= 2 else ROOT)
    assert depths(parents).max() == 3
    for word in itertools.product([0, 1], repeat=3):
        draws = [7] * 15
        at = ROOT
        for letter in word:
            draws[at + 1] = letter
            at = next(row for row in range(14) if parents[row] == at and tokens[row] == letter)
        verdict = acceptance.exact(Judged(tokens, parents, draws))
        assert tuple(tokens[row] for row in verdict.accepted) == word and verdict.bonus == 7
