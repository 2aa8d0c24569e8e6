"""The budget of a tree by price (`drafting.budget: auto`): so many of its best nodes that the round is expected to
commit the most tokens per unit of cost.

A node's score is the logarithm of the probability that its path is accepted, as the drafter assumes it. What was
accepted so far corrects it, by source and depth, and with it the order of the nodes. The server says what a pass takes
by its rows.
"""

import logging
import math
from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from hyco_export.core.numerics import along
from hyco_export.core.recipe import Price
from hyco_export.device.systems import Settings
from hyco_export.device.tree_builder import ranking
from hyco_export.protocol.tree import ROOT, Source, Tree, depths

PRIOR = 4.0  # accepted nodes that the scores weigh as much as for a source, and the source for one of its depths
DEEPEST = 8  # nodes below share one correction
ALL_DEPTHS = 0
LINK_MEMORY = 0.8  # share of the earlier rounds in the running mean of the link's time
OBJECTIVES = {"server-time": Price(server_ms=1.0), "delivery": Price(wall_ms=1.0)}
_log = logging.getLogger(__name__)


class Calibration:
    """How often nodes were accepted below an accepted parent, beside how often their scores expected it.

    By source and depth; a depth of which little was seen is corrected as its source is: otherwise depths that are never
    sent could never be found worth sending.
    """

    def __init__(self) -> None:
        self._expected: defaultdict[tuple[Source, int], float] = defaultdict(float)
        self._accepted: defaultdict[tuple[Source, int], int] = defaultdict(int)

    def observe(self, tree: Tree, accepted: Sequence[int]) -> None:
        """A verdict on `tree`: its accepted rows."""
        reached = {ROOT, *accepted}
        for row, (kind, edge) in enumerate(zip(_kinds(tree), _edges(tree), strict=True)):
            if tree.parents[row] in reached:
                for key in (kind, (kind[0], ALL_DEPTHS)):
                    self._expected[key] += edge
                    self._accepted[key] += row in reached

    def probabilities(self, tree: Tree) -> np.ndarray:
        """[N]: of each node's path being accepted; no node's is above its parent's."""
        found = np.zeros(len(tree))
        for row, (kind, edge) in enumerate(zip(_kinds(tree), _edges(tree), strict=True)):
            above = 1.0 if tree.parents[row] == ROOT else found[tree.parents[row]]
            found[row] = above * min(1.0, edge * self._factor(kind))
        return found

    def _factor(self, kind: tuple[Source, int]) -> float:
        factor = 1.0
        for key in ((kind[0], ALL_DEPTHS), kind):
            factor = (PRIOR * factor + self._accepted[key]) / (PRIOR + self._expected[key])
        return factor


class PricedBudget:
    """Chooses how many nodes of a tree are sent, and learns from the verdicts; serves one generation after another.

    Args:
        rows_ms: points (rows, ms) of the server's passes, by increasing rows.
        price: of a millisecond of the server, and of the round.
    """

    def __init__(self, rows_ms: Sequence[tuple[float, float]], price: Price) -> None:
        rows, ms = np.array(rows_ms, np.float64).T
        rising = np.minimum.accumulate(ms[::-1])[::-1]  # a larger pass that took less bounds the smaller: noise
        self._rows_ms = tuple(zip(rows.tolist(), rising.tolist(), strict=True))
        self._price = price
        self._calibration = Calibration()
        self._link_ms: float | None = None

    def rows(self, tree: Tree, draft_ms: float) -> np.ndarray:
        """The rows of `tree`, whose drafting took `draft_ms`, to send, best first: 1 or more where it has any.

        Of equal choices the largest, so that where rows cost nothing the whole tree is sent.
        """
        if not len(tree):
            return np.zeros(0, np.int64)
        probabilities = self._calibration.probabilities(tree)
        best_first = ranking(tree, probabilities)
        tokens = 1.0 + expected_accepted(tree, probabilities)
        costs = np.array([self._cost(1 + count, draft_ms) for count in range(1, len(tree) + 1)])
        worth = tokens / np.maximum(costs, np.finfo(np.float64).tiny)
        return best_first[: len(tree) - int(np.argmax(worth[::-1]))]

    def observe(self, tree: Tree, accepted: Sequence[int], link_ms: float) -> None:
        """The verdict on what was sent, and how long it was on its way."""
        self._calibration.observe(tree, accepted)
        before = link_ms if self._link_ms is None else self._link_ms
        self._link_ms = LINK_MEMORY * before + (1 - LINK_MEMORY) * link_ms

    def _cost(self, rows: int, draft_ms: float) -> float:
        server_ms = along(self._rows_ms, rows)
        wall_ms = draft_ms + (self._link_ms or 0.0) + server_ms
        return self._price.server_ms * server_ms + self._price.wall_ms * wall_ms


def expected_accepted(tree: Tree, probabilities: np.ndarray) -> np.ndarray:
    """[N]: accepted nodes to expect of the best 1, 2, ... N nodes, by the probabilities [N] of their paths.

    At most one node of a depth is accepted, and only below one of the depth above: what the probabilities of a depth
    sum up to beyond that does not count.
    """
    node_depths = depths(tree.parents)
    by_depth = np.zeros(max(node_depths, default=0))
    found = []
    for row in ranking(tree, probabilities):
        by_depth[node_depths[row] - 1] += probabilities[row]
        found.append(np.minimum.accumulate(np.minimum(by_depth, 1.0)).sum())
    return np.array(found)


def priced_budget(settings: Settings) -> PricedBudget | None:
    """What cuts the trees of a run; None where the recipe's number does, or where the server does not say its times."""
    drafting = settings.drafting
    if drafting.budget != "auto":
        return None
    if not settings.rows_ms:
        size = drafting.largest_tree
        _log.warning("drafting.budget is auto, but the server does not say what rows cost: trees of %d nodes", size)
        return None
    objective = drafting.objective
    return PricedBudget(settings.rows_ms, OBJECTIVES[objective] if isinstance(objective, str) else objective)


def _kinds(tree: Tree) -> list[tuple[Source, int]]:
    """Source and depth of each node."""
    pairs = zip(tree.sources, depths(tree.parents), strict=True)
    return [(source, min(int(depth), DEEPEST)) for source, depth in pairs]


def _edges(tree: Tree) -> list[float]:
    """What each node's score assumes of its own edge: a probability."""
    scores = tree.log_probs
    pairs = zip(scores, tree.parents, strict=True)
    return [math.exp(score - (0.0 if parent == ROOT else scores[parent])) for score, parent in pairs]
