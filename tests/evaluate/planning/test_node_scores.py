"""Node scores from traces: their parts against closed forms and the device's own trim, and a gain known by hand."""

import math

import msgspec
import numpy as np
import pytest

from hyco_export.device import tree_builder
from hyco_export.errors import HycoError
from hyco_export.evaluate.planning.node_scores import (
    LoggedTree,
    best,
    committed,
    compare,
    edge_acceptance,
    features,
    fit,
    log_acceptance,
    path_scores,
    slm_log_q,
)
from hyco_export.protocol import wire
from hyco_export.protocol.acceptance import Judged
from hyco_export.protocol.tree import Source, Tree
from tests.evaluate.synthetic_traces import CHAIN, SLM, generation, round_trace

L = math.log(0.5)
# a chain of two, and two SLM nodes under the root with log q of -1 and -2
TREE = Tree((10, 11, 20, 21), (-1, 0, -1, -1), (L, 2 * L, L - 1.0, L - 2.0), (CHAIN, CHAIN, SLM, SLM))
PROBS = (0.1, 0.1, 0.2, 0.6)  # p~: the SLM's second choice is the verifier's usual one
DRAW = {0: 10, 1: 20, 2: 21, 3: 21, 4: 21, 5: 21, 6: 20, 7: 99, 8: 21, 9: 21}  # of ten rounds


def logged(draw: int):
    """A round of TREE with this draw at the root; behind any node 99 is drawn."""
    evidence = wire.Evidence(
        list(TREE.tokens), list(TREE.parents), [draw, 99, 99, 99, 99], list(PROBS), list(PROBS), [1.0] * 5
    )
    accepted = tuple(row for row in (0, 2, 3) if TREE.tokens[row] == draw)
    return round_trace(accepted, tree=TREE, evidence=evidence)


def traces(prompts: int = 4):
    return [generation(*(logged(draw) for draw in DRAW.values()), prompt_id=f"p{number}") for number in range(prompts)]


def test_a_gain_that_is_known_by_hand() -> None:
    """Two of four nodes: the recipe's scores keep the chain's first and the SLM's first, worth 1 + 1 + 2 of ten draws
    beside ten bonus tokens; calibrated ones keep the SLM's two, worth 2 + 6."""
    found = compare(traces(), budget=2)
    assert best(TREE, np.array(TREE.log_probs), 2).tolist() == [True, True, False, False]
    assert found.mat == pytest.approx(1 + 1 / 10)
    assert found.calibrated_mat == pytest.approx(1 + 8 / 10)
    assert found.whole_mat == pytest.approx(1 + 9 / 10)
    assert found.gain == pytest.approx(1.8 / 1.1 - 1)
    assert found.low == pytest.approx(found.high) == pytest.approx(found.gain)  # every prompt is the same
    assert (found.prompts, found.rounds, found.system, found.rule) == (4, 40, "hyco", "exact")


def test_the_regression_finds_the_mean_of_each_kind() -> None:
    """One feature a kind and no ridge to speak of: the estimate is the weighted mean, by closed form."""
    x = np.repeat(np.eye(2), 500, axis=0)
    shares = np.concatenate([np.tile([1.0, 0.0, 0.0, 0.0], 125), np.full(500, 0.6)])
    tree = Tree((0,) * 1000, (-1,) * 1000, (0.0,) * 1000, (CHAIN,) * 1000)
    weights = fit([(LoggedTree(0, tree, Judged((), (), ()), x), shares)])
    assert np.exp(log_acceptance(np.eye(2), weights)) == pytest.approx([0.25, 0.6], abs=1e-3)


def test_an_edge_below_an_unlikely_node_hardly_counts() -> None:
    x = np.ones((2, 1))
    tree = Tree((1, 2), (-1, 0), (0.0, 0.0), (CHAIN, CHAIN))
    many = [(LoggedTree(0, tree, Judged((), (), ()), x), np.array([0.001, 1.0]))] * 2000
    estimate = float(np.exp(log_acceptance(np.ones((1, 1)), fit(many)))[0])
    assert estimate == pytest.approx((0.001 + 0.001 * 1.0) / 1.001, rel=0.05)


def test_the_best_nodes_are_those_that_the_device_keeps() -> None:
    rng = np.random.default_rng(7)
    for _ in range(20):
        parents = [int(rng.integers(-1, row)) for row in range(40)]
        edges = -rng.integers(1, 4, 40) / 4  # many ties
        tree = Tree(tuple(range(40)), tuple(parents), (), ())
        scores = path_scores(tree, edges)
        scored = Tree(tree.tokens, tree.parents, tuple(scores.tolist()), (Source.SLM,) * 40)
        _, kept = tree_builder.trim(scored, 16)
        assert np.flatnonzero(best(tree, scores, 16)).tolist() == list(kept)


def test_log_q_is_read_back_from_scores() -> None:
    assert slm_log_q(TREE) == pytest.approx([0.0, 0.0, -1.0, -2.0])
    log_q = np.log(np.array([[0.5, 0.3, 0.2], [0.1, 0.7, 0.2]]))
    planted = tree_builder.plant((1, 2), (), math.log(0.66))
    grown = tree_builder.add_candidates(planted, (-1, 1), log_q, np.array([5, 6, 7]), math.log(0.66), 3)
    assert slm_log_q(grown)[2:] == pytest.approx(np.sort(log_q, axis=1)[:, ::-1].ravel())
    with pytest.raises(HycoError, match="without a chain"):
        slm_log_q(Tree((1,), (-1,), (-0.1,), (SLM,)))


def test_what_is_left_of_a_tree_is_judged_by_its_rule() -> None:
    trace = traces(1)[0]
    judged = Judged.of(logged(21).evidence)
    assert committed(judged, np.array([True, True, True, True]), trace) == 2
    assert committed(judged, np.array([True, True, True, False]), trace) == 1
    likely = msgspec.structs.replace(trace, acceptance=wire.Acceptance(rule="epsilon", epsilon=0.05))
    assert committed(judged, np.array([True, True, False, False]), likely) == 3
    assert edge_acceptance(judged, likely).tolist() == [1.0] * 4
    assert edge_acceptance(judged, trace) == pytest.approx(PROBS)


def test_features_tell_sources_depths_and_ranks_apart() -> None:
    found = features(logged(10))
    assert found.shape[0] == 4
    assert len({tuple(row) for row in found.tolist()}) == 4
    shuffled = features(logged(21))
    assert (found == shuffled).all()  # of the tree alone, not of what was drawn


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda found: found[:1], "here is one"),
        (lambda found: [generation(round_trace((0,)), prompt_id=p) for p in "ab"], "logged without p~"),
        (
            lambda found: [msgspec.structs.replace(one, acceptance=wire.Acceptance("typical", 0.005)) for one in found],
            "judged by typical",
        ),
    ],
)
def test_traces_that_cannot_tell_are_refused(change, message: str) -> None:
    with pytest.raises(HycoError, match=message):
        compare(change(traces()), budget=2)


def test_trees_no_larger_than_the_budget_leave_no_choice() -> None:
    with pytest.raises(HycoError, match="no logged tree has more than 4 nodes"):
        compare(traces(), budget=4)
