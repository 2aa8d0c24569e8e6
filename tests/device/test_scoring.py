"""The hybrid tree against a brute-force reading of HyCo, §3.1: paths as tuples, every candidate kept, one sort."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hyco_export.core.numerics import LOG_SOFTMAX_BOUND
from hyco_export.device.tree_builder import add_candidates, best_columns, plant, tempered, trim
from hyco_export.errors import ProtocolError
from hyco_export.protocol.tree import ROOT, Source, Tree, check_tree, depths, path_to

EDGE = math.log(0.66)
VOCAB_SIZE = 12
KEEP_IDS = np.array([0, 2, 3, 5, 6, 7, 9, 11])


def brute_force(
    chain: list[int], runner_ups: list[int], log_probs: np.ndarray, per_row: int, budget: int, stops: set[int]
) -> list[tuple[tuple[int, ...], float, Source]]:
    """(path of tokens, score, source) of the kept nodes, best first; ties as the tree's order demands."""
    nodes = []  # (path, score, depth, is candidate, row, rank, source)
    planted = {}
    for depth in range(1, len(chain) + 1):
        if not stops & set(chain[: depth - 1]):
            planted[tuple(chain[:depth])] = (depth * EDGE, Source.CHAIN)
    for depth in range(1, len(runner_ups) + 1):
        path = (*chain[: depth - 1], runner_ups[depth - 1])
        if not stops & set(chain[: depth - 1]):
            planted.setdefault(path, ((depth - 1) * EDGE + 2 * EDGE, Source.RUNNER_UP))
    for row, (path, (score, source)) in enumerate(planted.items()):
        nodes.append((path, score, len(path), False, row, 0, source))
    for row, path in enumerate([(), *planted]):
        if path and path[-1] in stops:
            continue
        base = planted[path][0] if path else 0.0
        ranked = sorted(range(len(KEEP_IDS)), key=lambda column: (-log_probs[row, column], column))
        for rank, column in enumerate(ranked[:per_row]):
            child = (*path, int(KEEP_IDS[column]))
            if child not in planted:
                score = EDGE + base + float(log_probs[row, column])
                nodes.append((child, score, len(child), True, row, rank, Source.SLM))
    nodes.sort(key=lambda node: (-node[1], node[2], node[3], node[4], node[5]))
    return [(path, score, source) for path, score, *_, source in nodes[:budget]]


def as_paths(tree: Tree) -> dict[tuple[int, ...], tuple[float, Source]]:
    """Path of tokens -> (score, source)."""
    return {
        tuple(tree.tokens[node] for node in path_to(tree.parents, row)): (tree.log_probs[row], tree.sources[row])
        for row in range(len(tree))
    }


def build(
    chain: list[int], runner_ups: list[int], log_probs: np.ndarray, per_row: int, budget: int, stops: set[int]
) -> tuple[Tree, tuple[int, ...], Tree]:
    planted = plant(chain, runner_ups, EDGE, stops)
    rows = (ROOT, *range(len(planted)))
    grown = add_candidates(planted, rows, log_probs[: len(rows)], KEEP_IDS, EDGE, per_row, stops)
    return *trim(grown, budget), planted


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_hybrid_tree_is_the_brute_force_tree(data: st.DataObject) -> None:
    token = st.integers(0, VOCAB_SIZE - 1)
    chain = data.draw(st.lists(token, min_size=1, max_size=4))
    runner_ups = data.draw(st.lists(token, max_size=min(2, len(chain))))
    stops = data.draw(st.sets(token, max_size=2))
    budget = data.draw(st.integers(len(chain) + len(runner_ups), 20))
    per_row = data.draw(st.integers(1, 10))
    # few distinct levels: many ties, also between a candidate and a planted node (EDGE + 0 * EDGE, 2 * EDGE, ...)
    levels = st.sampled_from([EDGE, 2 * EDGE, -1.0, -3.0])
    width = len(KEEP_IDS)
    shape = (1 + len(chain) + len(runner_ups)) * width
    log_probs = np.array(data.draw(st.lists(levels, min_size=shape, max_size=shape))).reshape(-1, width)
    tree, _, _ = build(chain, runner_ups, log_probs, per_row, budget, stops)
    expected = brute_force(chain, runner_ups, log_probs, per_row, budget, stops)
    assert as_paths(tree) == {path: (score, source) for path, score, source in expected}
    check_tree(tree.tokens, tree.parents, VOCAB_SIZE, budget)


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 1 << 30), budget=st.integers(6, 40))
def test_trimmed_rows_keep_their_place_and_their_ancestors(seed: int, budget: int) -> None:
    generator = np.random.default_rng(seed)
    chain = [int(token) for token in generator.permutation(VOCAB_SIZE)[:4]]
    runner_ups = [(token + 1) % VOCAB_SIZE for token in chain[:2]]
    log_probs = np.log(generator.dirichlet(np.ones(len(KEEP_IDS)), size=7))
    tree, kept, planted = build(chain, runner_ups, log_probs, 32, budget, set())
    assert list(kept) == sorted(kept)
    for row, node in enumerate(kept):
        if node < len(planted):
            assert (tree.tokens[row], tree.sources[row]) == (planted.tokens[node], planted.sources[node])
    assert all(ROOT <= parent < row for row, parent in enumerate(tree.parents))


def test_scores_of_the_planted_nodes() -> None:
    tree = plant([10, 11, 12, 13], [20, 21], EDGE)
    assert tree.tokens == (10, 11, 12, 13, 20, 21)
    assert tree.parents == (ROOT, 0, 1, 2, ROOT, 0)
    assert tree.log_probs == pytest.approx([EDGE, 2 * EDGE, 3 * EDGE, 4 * EDGE, 2 * EDGE, 3 * EDGE])
    assert list(depths(tree.parents)) == [1, 2, 3, 4, 1, 2]
    assert tree.sources == (Source.CHAIN,) * 4 + (Source.RUNNER_UP,) * 2


def test_nothing_stands_under_a_stop_token() -> None:
    tree = plant([10, 1, 12, 13], [20, 21], EDGE, stop_ids={1})
    assert tree.tokens == (10, 1, 20, 21)
    rows = (ROOT, *range(len(tree)))
    grown = add_candidates(tree, rows, np.full((5, 8), -2.0), KEEP_IDS, EDGE, 8, stop_ids={1})
    assert 1 not in grown.parents
    assert {ROOT, 0, 2, 3} <= set(grown.parents)


def test_runner_up_equal_to_the_chain_is_one_node() -> None:
    tree = plant([10, 11], [10, 21], EDGE)
    assert tree.tokens == (10, 11, 21)
    check_tree(tree.tokens, tree.parents, 32, 3)


def test_second_expansion_drops_what_already_stands_there() -> None:
    once = add_candidates(Tree((), ()), [ROOT], np.array([[-1.0, -2.0, -3.0]]), np.array([4, 5, 6]), EDGE, 2)
    twice = add_candidates(once, [ROOT, 0], np.array([[-1.0] * 3, [-1.0] * 3]), np.array([4, 5, 6]), EDGE, 3)
    assert (twice.tokens, twice.parents) == ((4, 5, 6, 4, 5, 6), (ROOT, ROOT, ROOT, 0, 0, 0))


def test_ties_go_to_the_smaller_depth_then_to_planted_nodes_then_to_the_better_rank() -> None:
    chain = [10, 11, 12]  # scores L, 2 L, 3 L
    log_probs = np.full((4, 8), -9.0)
    log_probs[0, :2] = 2 * EDGE  # candidates 0 and 2 at depth 1 score 3 L
    log_probs[2, 3] = 0.0  # candidate 5 under node 1, depth 3, scores 3 L
    for budget, tokens in ((3, [10, 11, 0]), (4, [10, 11, 0, 2]), (5, [10, 11, 12, 0, 2]), (6, [10, 11, 12, 0, 2, 5])):
        tree, _, _ = build(chain, [], log_probs, 8, budget, set())
        assert list(tree.tokens) == tokens


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from([-1.0, -2.0, -2.5, -4.0]), min_size=1, max_size=30), st.integers(1, 35))
def test_best_columns_is_a_stable_sort(values: list[float], count: int) -> None:
    expected = sorted(range(len(values)), key=lambda column: (-values[column], column))[:count]
    assert list(best_columns(np.array(values), count)) == expected


@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 1 << 30), width=st.integers(60, 3_000), levels=st.integers(1, 3_000), count=st.integers(1, 64)
)
def test_best_columns_of_many_groups_is_a_stable_sort(seed: int, width: int, levels: int, count: int) -> None:
    values = -np.random.default_rng(seed).integers(0, levels, width).astype(np.float32)  # few levels: many ties
    assert list(best_columns(values, count)) == list(np.argsort(-values, kind="stable")[:count])


def test_an_edge_that_costs_nothing_is_caught() -> None:
    free_child = Tree((4, 5, 6), (ROOT, 0, ROOT), (-3.0, -1.0, -2.0), (Source.SLM,) * 3)
    with pytest.raises(AssertionError, match="lost its parent"):
        trim(free_child, 1)


def test_a_sent_tree_passes_the_servers_check_at_paper_size() -> None:
    generator = np.random.default_rng(3)
    keep = np.sort(generator.choice(262_144, 86_089, replace=False))
    chain = [int(token) for token in keep[generator.integers(0, len(keep), 4)]]
    runner_ups = [int(token) for token in keep[generator.integers(0, len(keep), 2)]]
    log_probs = np.log(generator.dirichlet(np.full(64, 0.2), size=7))
    padded = np.full((7, len(keep)), -30.0)
    padded[:, np.arange(64) * 1345] = log_probs
    planted = plant(chain, runner_ups, EDGE)
    grown = add_candidates(planted, (ROOT, *range(6)), padded, keep, EDGE, 32)
    tree, _ = trim(grown, 32)
    assert len(tree) == 32
    check_tree(tree.tokens, tree.parents, 262_144, 32)
    with pytest.raises(ProtocolError, match="at most 31"):
        check_tree(tree.tokens, tree.parents, 262_144, 31)


@pytest.mark.parametrize("temperature", [0.2, 0.7, 1.3, 5.0])
def test_another_temperature_is_a_power_of_the_probabilities(temperature: float) -> None:
    generator = np.random.default_rng(4)
    shares = generator.dirichlet(np.full(500, 0.3), size=3) + 1e-12  # q^(1/T) / sum of q^(1/T), summed exactly
    log_q = np.log(shares).astype(np.float32)
    before = log_q.copy()
    found = tempered(log_q, temperature)
    assert found.dtype == np.float32
    for row, wide in zip(found, np.exp(log_q.astype(np.float64)), strict=True):
        powers = [float(share) ** (1.0 / temperature) for share in wide]
        total = math.fsum(powers)
        wanted = np.array([math.log(power / total) for power in powers])
        span = float(np.ptp(wanted))
        assert np.abs(row - wanted).max() <= LOG_SOFTMAX_BOUND * (1 + span)
    assert np.array_equal(log_q, before), "the pass's own log q are read again"


def test_temperature_one_changes_nothing() -> None:
    log_q = np.log(np.array([[0.5, 0.25, 0.25]], np.float32))
    assert tempered(log_q, 1.0) is log_q
