"""HyCo's drafter: a chain gives the tree its depth, one or two SLM passes give it its width (§3.1)."""

import math
import time
from collections.abc import Collection, Sequence
from typing import Protocol

import msgspec
import numpy as np

from hyco_export.core.numerics import MS_PER_S
from hyco_export.core.recipe import Drafting
from hyco_export.device.backends import Device
from hyco_export.device.drafters.drafter import Draft
from hyco_export.device.interfaces import Given, HeadDraft
from hyco_export.device.kv_state import HeadState, ReplyChain
from hyco_export.device.systems import Settings
from hyco_export.device.tree_builder import Edges, SlmState, TreeBuilder, plant


class TreeRule(msgspec.Struct, frozen=True):
    """How a tree is scored and cut (HyCo, §3.1)."""

    edge_log_prob: float  # L: ln 0.66 in the paper, the chain's acceptance per depth
    budget: int  # nodes sent
    candidates_per_row: int  # the SLM's best children taken per expanded node
    temperature: float = 1.0  # of the SLM's distribution
    second_pass_nodes: int | None = None  # forwarded by a second pass, best first; None: all that have no children

    @classmethod
    def of(cls, drafting: Drafting) -> "TreeRule":
        """The hybrid's rule: an edge costs the log of the chain's assumed acceptance."""
        return cls(
            math.log(drafting.chain_acceptance),
            drafting.budget,
            drafting.candidates_per_row,
            drafting.slm_temperature,
            drafting.second_pass_nodes,
        )

    @property
    def edges(self) -> Edges:
        return Edges(self.edge_log_prob, self.candidates_per_row, self.temperature)


class Planter(Protocol):
    """Where the chain comes from: `kv_state.HeadState` on the device, or `kv_state.ReplyChain` from the server."""

    def begin(self, ids: Sequence[int], given: Given) -> None: ...

    def observe(self, ids: Sequence[int], given: Given) -> None: ...

    def draft(self) -> HeadDraft: ...


class HybridDrafter:
    """Plants a chain (and runner-ups), then lets the SLM add children.

    Args:
        planter: what drafts the chain.
        slm: its rings follow the committed tokens.
        keep_ids: [C] verifier ids of the columns of the SLM's log-probabilities.
        rule: scores and budget.
        stop_ids: tokens after which nothing is drafted.
        passes: of the SLM: 1 over the root and all planted nodes; a second one over the nodes that the tree keeps and
            that have no children yet, as many as fit (HyCo-2P, a reading of §3.1).
    """

    def __init__(
        self,
        planter: Planter,
        slm: SlmState,
        keep_ids: np.ndarray,
        rule: TreeRule,
        stop_ids: Collection[int],
        passes: int = 1,
    ) -> None:
        self._planter = planter
        self._slm = slm
        self._keep_ids = keep_ids
        self._rule = rule
        self._edges = rule.edges
        self._stop_ids = frozenset(stop_ids)
        self._passes = passes
        self._builder: TreeBuilder | None = None

    def begin(self, ids: Sequence[int], given: Given) -> None:
        self._planter.begin(ids, given)
        self._slm.begin(ids)

    def propose(self, ids: Sequence[int]) -> Draft:
        started = time.perf_counter()
        head_draft = self._planter.draft()
        head_ms = (time.perf_counter() - started) * MS_PER_S
        planted = plant(head_draft.chain, head_draft.runner_ups, self._rule.edge_log_prob, self._stop_ids)
        base = self._slm.base(ids, len(planted.tokens))
        self._builder = builder = TreeBuilder(self._slm, self._keep_ids, self._stop_ids, base, planted)
        for earlier in range(self._passes):
            nodes = builder.fitting(builder.unexpanded()[: self._rule.second_pass_nodes if earlier else None])
            if not nodes:
                break
            builder.expand(nodes, self._edges)
            if builder.base:
                builder.settle_base()
            builder.trim(self._rule.budget)
        return Draft(builder.tree, head_ms, builder.slm_ms)

    def observe(self, accepted: Sequence[int], ids: Sequence[int], given: Given) -> None:
        self._planter.observe(ids, given)
        assert self._builder is not None  # a verdict follows a proposal
        self._builder.commit(accepted)
        self._slm.forget()


def make_hybrid(device: Device, settings: Settings, passes: int = 1) -> HybridDrafter:
    """With the device's own head."""
    return _make(HeadState(device.head, device.handoff), device, settings, passes)


def make_reply_chain(device: Device, settings: Settings) -> HybridDrafter:
    """With the chains that come with the server's replies."""
    return _make(ReplyChain(), device, settings)


def _make(planter: Planter, device: Device, settings: Settings, passes: int = 1) -> HybridDrafter:
    rule = TreeRule.of(settings.drafting)
    return HybridDrafter(planter, SlmState(device.slm), device.slm_ids, rule, settings.stop_ids, passes)
