"""A chain that the SLM drafts alone, token by token, as long as its confidence lasts (SLED; Li et al. 2025a).

With other lengths it also drafts for Synera-like offload and for the SLM answering alone.
"""

import math
from collections.abc import Sequence

from hyco_export.core.recipe import SlmChain
from hyco_export.device.backends import Device
from hyco_export.device.drafters.drafter import Draft, SlmDrafter
from hyco_export.device.systems import Settings
from hyco_export.device.tree_builder import Edges, SlmState, TreeBuilder
from hyco_export.protocol.tree import ROOT

BEST_CHILD = Edges(edge_log_prob=0.0, per_row=1)  # a score is then the sum of log q


ALONE = SlmChain(confidence=0.5, longest=1)  # the SLM by itself: a token a pass, taken whatever its confidence


class SlmChainDrafter(SlmDrafter):
    """Top-1 tokens of sequential passes.

    Args:
        slm: its rings follow the committed tokens.
        options: the chain ends with the first token whose q is below `confidence`, a stop token, or the `longest` one.
    """

    def __init__(self, slm: SlmState, options: SlmChain) -> None:
        super().__init__(slm)
        self._options = options

    def propose(self, ids: Sequence[int]) -> Draft:
        self._builder = builder = TreeBuilder(self._slm, self._slm.base(ids, nodes=0))
        node, log_prob, least = ROOT, 0.0, math.log(self._options.confidence)
        for _ in range(min(self._options.longest, self._slm.rows)):
            builder.expand((node,), BEST_CHILD)
            if builder.base:
                builder.settle_base()
            node += 1  # the new leaf
            confidence, log_prob = builder.tree.log_probs[node] - log_prob, builder.tree.log_probs[node]
            if confidence < least or builder.tree.tokens[node] in self._slm.stop_ids:
                break
        return Draft(builder.tree, 0.0, builder.slm_ms)


def make_alone(device: Device, settings: Settings) -> SlmChainDrafter:
    """One token a pass, whatever its confidence."""
    return _make(device, settings, ALONE)


def make_sled(device: Device, settings: Settings) -> SlmChainDrafter:
    """As long as `$.drafting.sled` says."""
    return _make(device, settings, settings.drafting.sled)


def make_synera(device: Device, settings: Settings) -> SlmChainDrafter:
    """As long as `$.drafting.synera` says."""
    return _make(device, settings, settings.drafting.synera)


def _make(device: Device, settings: Settings, options: SlmChain) -> SlmChainDrafter:
    return SlmChainDrafter(SlmState(device.slm, device.slm_ids, settings.stop_ids), options)
