"""HyCo's drafter: a chain gives the tree its depth, one or two SLM passes give it its width (§3.1)."""

import time
from collections.abc import Sequence
from typing import Protocol

from hyco_export.core.numerics import MS_PER_S
from hyco_export.device.backends import Device
from hyco_export.device.drafters.drafter import Draft, SlmDrafter
from hyco_export.device.interfaces import Given, HeadDraft
from hyco_export.device.kv_state import HeadState, ReplyChain
from hyco_export.device.systems import Settings
from hyco_export.device.tree_builder import SlmState, TreeBuilder, TreeRule, plant


class Planter(Protocol):
    """Where the chain comes from: `kv_state.HeadState` on the device, or `kv_state.ReplyChain` from the server."""

    def begin(self, ids: Sequence[int], given: Given) -> None: ...

    def observe(self, ids: Sequence[int], given: Given) -> None: ...

    def draft(self) -> HeadDraft: ...


class HybridDrafter(SlmDrafter):
    """Plants a chain (and runner-ups), then lets the SLM add children.

    Args:
        planter: what drafts the chain.
        slm: its rings follow the committed tokens.
        rule: scores, budget and passes: the first over the root and all planted nodes; a second one over the nodes
            that the tree keeps and that have no children yet, as many as fit (HyCo-2P, a reading of §3.1).
    """

    def __init__(self, planter: Planter, slm: SlmState, rule: TreeRule) -> None:
        super().__init__(slm)
        self._planter = planter
        self._rule = rule

    def begin(self, ids: Sequence[int], given: Given) -> None:
        self._planter.begin(ids, given)
        super().begin(ids, given)

    def propose(self, ids: Sequence[int]) -> Draft:
        started = time.perf_counter()
        head_draft = self._planter.draft()
        head_ms = (time.perf_counter() - started) * MS_PER_S
        planted = plant(head_draft.chain, head_draft.runner_ups, self._rule.edge_log_prob, self._slm.stop_ids)
        base = self._slm.base(ids, len(planted.tokens))
        self._builder = builder = TreeBuilder(self._slm, base, planted)
        for earlier in range(self._rule.passes):
            nodes = builder.fitting(builder.unexpanded()[: self._rule.second_pass_nodes if earlier else None])
            if not nodes:
                break
            builder.expand(nodes, self._rule.edges)
            if builder.base:
                builder.settle_base()
            builder.trim(self._rule.budget)
        return Draft(builder.tree, head_ms, builder.slm_ms)

    def observe(self, accepted: Sequence[int], ids: Sequence[int], given: Given) -> None:
        self._planter.observe(ids, given)
        super().observe(accepted, ids, given)


def make_hybrid(device: Device, settings: Settings, passes: int = 1) -> HybridDrafter:
    """With the device's own head."""
    return _make(HeadState(device.head, device.handoff), device, settings, passes)


def make_reply_chain(device: Device, settings: Settings) -> HybridDrafter:
    """With the chains that come with the server's replies."""
    return _make(ReplyChain(), device, settings)


def _make(planter: Planter, device: Device, settings: Settings, passes: int = 1) -> HybridDrafter:
    slm = SlmState(device.slm, device.slm_ids, settings.stop_ids)
    return HybridDrafter(planter, slm, TreeRule.of_hybrid(settings.drafting, passes))
