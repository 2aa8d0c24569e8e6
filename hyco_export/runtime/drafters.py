"""Drafters: what proposes a tree for the next round. One small class each, behind one Protocol.

Knows scoring and the two feeds; not the wire and not the loop (`driver` calls these three methods and nothing else).
"""

import time
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

import msgspec
import numpy as np

from hyco_export.runtime.feeds import HeadFeed, SlmFeed
from hyco_export.runtime.scoring import add_candidates, plant, trim
from hyco_export.runtime.tree import EMPTY_TREE, ROOT, Source, Tree
from hyco_export.runtime.wire import Handoff


class Draft(msgspec.Struct, frozen=True):
    """A proposal and what it cost on the device."""

    tree: Tree
    head_ms: float = 0.0
    slm_ms: float = 0.0


class Drafter(Protocol):
    """Proposes trees. `ids` are all committed ids, the root last."""

    def begin(self, ids: Sequence[int], handoff: Handoff | None) -> None:
        """A session was primed (or primed again): forget everything and take up these ids."""
        ...

    def propose(self, ids: Sequence[int]) -> Draft:
        """A tree under the root."""
        ...

    def observe(self, accepted: Sequence[int], ids: Sequence[int], handoff: Handoff | None) -> None:
        """The last proposal's accepted rows, depth 1 first; `ids` now end with the new root."""
        ...


class NullDrafter:
    """Proposes nothing: the server decodes plainly, or drafts with its own head (Cloud+MTP)."""

    def begin(self, ids: Sequence[int], handoff: Handoff | None) -> None:
        pass

    def propose(self, ids: Sequence[int]) -> Draft:
        return Draft(EMPTY_TREE)

    def observe(self, accepted: Sequence[int], ids: Sequence[int], handoff: Handoff | None) -> None:
        pass


class OracleDrafter:
    """Proposes the chain that somebody who knows the answer gives: it must reach MAT = depth + 1, or the loop is wrong.

    Args:
        continuation: the next `depth` tokens after the given ids.
        depth: nodes of the chain.
    """

    def __init__(self, continuation: Callable[[Sequence[int], int], Sequence[int]], depth: int) -> None:
        self._continuation = continuation
        self._depth = depth

    def begin(self, ids: Sequence[int], handoff: Handoff | None) -> None:
        pass

    def propose(self, ids: Sequence[int]) -> Draft:
        tokens = tuple(self._continuation(ids, self._depth))
        count = len(tokens)
        return Draft(Tree(tokens, tuple(range(ROOT, count - 1)), (0.0,) * count, (Source.CHAIN,) * count))

    def observe(self, accepted: Sequence[int], ids: Sequence[int], handoff: Handoff | None) -> None:
        pass


class TreeRule(msgspec.Struct, frozen=True):
    """How the hybrid tree is scored and cut (HyCo, §3.1)."""

    edge_log_prob: float  # L: ln 0.66 in the paper, the chain's acceptance per depth
    budget: int  # nodes sent
    candidates_per_row: int  # the SLM's best children taken per expanded node


class HybridDrafter:
    """HyCo: the head's chain and runner-ups give depth, one SLM pass over root and planted nodes gives width.

    Args:
        head: fed with the hand-off of every reply.
        slm: fed with the committed tokens.
        keep_ids: [C] verifier ids of the columns of the SLM's log-probabilities.
        rule: scores and budget.
        stop_ids: tokens after which nothing is drafted.
    """

    def __init__(
        self, head: HeadFeed, slm: SlmFeed, keep_ids: np.ndarray, rule: TreeRule, stop_ids: Collection[int]
    ) -> None:
        self._head = head
        self._slm = slm
        self._keep_ids = keep_ids
        self._rule = rule
        self._stop_ids = frozenset(stop_ids)
        self._planted_rows: dict[int, int] = {}  # row of the sent tree -> planted node

    def begin(self, ids: Sequence[int], handoff: Handoff | None) -> None:
        self._head.begin(ids, handoff)
        self._slm.begin(ids)

    def propose(self, ids: Sequence[int]) -> Draft:
        rule = self._rule
        started = time.perf_counter()
        head_draft = self._head.draft()
        head_done = time.perf_counter()
        planted = plant(head_draft.chain, head_draft.runner_ups, rule.edge_log_prob, self._stop_ids)
        pass_started = time.perf_counter()
        log_probs = self._slm.expand(ids, planted)  # [1 + P, C]
        pass_done = time.perf_counter()
        expanded = (ROOT, *range(len(planted)))
        grown = add_candidates(
            planted, expanded, log_probs, self._keep_ids, rule.edge_log_prob, rule.candidates_per_row, self._stop_ids
        )
        tree, kept = trim(grown, rule.budget)
        self._planted_rows = {row: node for row, node in enumerate(kept) if node < len(planted)}
        return Draft(tree, (head_done - started) * 1e3, (pass_done - pass_started) * 1e3)

    def observe(self, accepted: Sequence[int], ids: Sequence[int], handoff: Handoff | None) -> None:
        self._head.observe(ids, handoff)
        self._slm.commit([self._planted_rows[row] for row in accepted if row in self._planted_rows])
