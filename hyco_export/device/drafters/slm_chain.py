"""A chain that the SLM drafts alone, token by token, as long as its confidence lasts (SLED; Li et al. 2025a).

With other lengths it also drafts for Synera-like offload and for the SLM answering alone.
"""

import math
from collections.abc import Collection, Sequence

import msgspec
import numpy as np

from hyco_export.core.recipe import SlmChain
from hyco_export.device.backends import Device
from hyco_export.device.drafters.drafter import Draft
from hyco_export.device.interfaces import Given
from hyco_export.device.systems import Settings
from hyco_export.device.tree_builder import Edges, SlmState, TreeBuilder
from hyco_export.protocol.tree import ROOT

BEST_CHILD = Edges(edge_log_prob=0.0, per_row=1)  # a score is then the sum of log q


class ChainRule(msgspec.Struct, frozen=True):
    """The chain ends with the first token whose q is below `confidence`, a stop token, or the `longest` one."""

    confidence: float
    longest: int


ALONE = ChainRule(confidence=0.0, longest=1)  # the SLM by itself: a token a pass


class SlmChainDrafter:
    """Top-1 tokens of sequential passes.

    Args:
        slm: its rings follow the committed tokens.
        keep_ids: [C] verifier ids of the columns of the SLM's log-probabilities.
        rule: where the chain ends.
        stop_ids: tokens after which nothing is drafted.
    """

    def __init__(self, slm: SlmState, keep_ids: np.ndarray, rule: ChainRule, stop_ids: Collection[int]) -> None:
        self._slm = slm
        self._keep_ids = keep_ids
        self._longest = rule.longest
        self._least = math.log(rule.confidence) if rule.confidence > 0 else -math.inf
        self._stop_ids = frozenset(stop_ids)
        self._builder: TreeBuilder | None = None

    def begin(self, ids: Sequence[int], given: Given) -> None:
        self._slm.begin(ids)

    def propose(self, ids: Sequence[int]) -> Draft:
        self._builder = builder = TreeBuilder(self._slm, self._keep_ids, self._stop_ids, self._slm.base(ids, nodes=0))
        node, log_prob = ROOT, 0.0
        for _ in range(min(self._longest, self._slm.rows)):
            builder.expand((node,), BEST_CHILD)
            if builder.base:
                builder.settle_base()
            node += 1  # the new leaf
            confidence, log_prob = builder.tree.log_probs[node] - log_prob, builder.tree.log_probs[node]
            if confidence < self._least or builder.tree.tokens[node] in self._stop_ids:
                break
        return Draft(builder.tree, 0.0, builder.slm_ms)

    def observe(self, accepted: Sequence[int], ids: Sequence[int], given: Given) -> None:
        assert self._builder is not None  # a verdict follows a proposal
        self._builder.commit(accepted)
        self._slm.forget()


def make_alone(device: Device, settings: Settings) -> SlmChainDrafter:
    """One token a pass, whatever its confidence."""
    return _make(device, settings, ALONE)


def make_sled(device: Device, settings: Settings) -> SlmChainDrafter:
    """As long as `$.drafting.sled` says."""
    return _make(device, settings, _rule(settings.drafting.sled))


def make_synera(device: Device, settings: Settings) -> SlmChainDrafter:
    """As long as `$.drafting.synera` says."""
    return _make(device, settings, _rule(settings.drafting.synera))


def _rule(own: SlmChain) -> ChainRule:
    return ChainRule(own.confidence, own.longest)


def _make(device: Device, settings: Settings, rule: ChainRule) -> SlmChainDrafter:
    return SlmChainDrafter(SlmState(device.slm), device.slm_ids, rule, settings.stop_ids)
