"""The SpecEdge-style drafter: a tree that the SLM alone grows, one pass a level (Park et al. 2025; HyCo, §4.2).

Knows scoring and the SLM's feed; not the wire and not the loop.
"""

from collections.abc import Collection, Sequence

import numpy as np

from hyco_export.runtime.drafters.drafter import Draft
from hyco_export.runtime.drafters.hybrid import TreeRule
from hyco_export.runtime.feeds import SlmFeed
from hyco_export.runtime.growth import Growth
from hyco_export.runtime.ports import Given


class SpecEdgeDrafter:
    """Each pass forwards the best nodes without children, as many as fit, and keeps the best `budget` nodes overall.

    Args:
        slm: fed with the committed tokens.
        keep_ids: [C] verifier ids of the columns of the SLM's log-probabilities.
        rule: scores and budget; ln 0.9 an edge, 32 nodes and 16 children a row in the paper.
        stop_ids: tokens after which nothing is drafted.
        passes: at most; 4 in the paper. It stops earlier when no new child beats the last node kept.
    """

    def __init__(
        self, slm: SlmFeed, keep_ids: np.ndarray, rule: TreeRule, stop_ids: Collection[int], passes: int = 4
    ) -> None:
        self._slm = slm
        self._keep_ids = keep_ids
        self._rule = rule
        self._edges = rule.edges
        self._stop_ids = frozenset(stop_ids)
        self._passes = passes
        self._growth: Growth | None = None

    def begin(self, ids: Sequence[int], given: Given) -> None:
        self._slm.begin(ids)

    def propose(self, ids: Sequence[int]) -> Draft:
        base = self._slm.base(ids, nodes=0)
        self._growth = growth = Growth(self._slm, self._keep_ids, self._stop_ids, base)
        if self._grow(growth):
            growth.settle_base()
            self._grow_for(growth, self._passes - 1)
        return Draft(growth.tree, 0.0, growth.slm_ms)

    def observe(self, accepted: Sequence[int], ids: Sequence[int], given: Given) -> None:
        assert self._growth is not None  # a verdict follows a proposal
        self._growth.commit(accepted)
        self._slm.forget()

    def _grow_for(self, growth: Growth, passes: int) -> None:
        for _ in range(passes):
            if not self._grow(growth):
                break

    def _grow(self, growth: Growth) -> bool:
        """One pass; did it change the tree?"""
        before = growth.tree
        nodes = growth.fitting(growth.unexpanded())
        if not nodes:
            return False
        growth.expand(nodes, self._edges)
        growth.trim(self._rule.budget)
        return growth.tree != before
