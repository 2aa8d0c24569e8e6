"""Drafters: what proposes a tree for the next round. One small class a file; which one a system uses: `systems`."""

from hyco_export.runtime.drafters.drafter import Draft, Drafter, ProactiveDrafter
from hyco_export.runtime.drafters.hybrid import HybridDrafter, TreeRule
from hyco_export.runtime.drafters.null import NullDrafter
from hyco_export.runtime.drafters.proactive import ProactiveSpecEdgeDrafter
from hyco_export.runtime.drafters.slm_chain import ChainRule, SlmChainDrafter
from hyco_export.runtime.drafters.specedge import SpecEdgeDrafter

__all__ = [
    "ChainRule",
    "Draft",
    "Drafter",
    "HybridDrafter",
    "NullDrafter",
    "ProactiveDrafter",
    "ProactiveSpecEdgeDrafter",
    "SlmChainDrafter",
    "SpecEdgeDrafter",
    "TreeRule",
]
