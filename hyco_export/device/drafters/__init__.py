"""Drafters: what proposes a tree for the next round. `systems` says which one a system uses."""

from hyco_export.device.drafters.drafter import Draft, Drafter, NullDrafter, ProactiveDrafter
from hyco_export.device.drafters.head_chain import HeadChainDrafter
from hyco_export.device.drafters.hybrid import HybridDrafter, TreeRule
from hyco_export.device.drafters.slm_chain import ChainRule, SlmChainDrafter
from hyco_export.device.drafters.specedge import ProactiveSpecEdgeDrafter, SpecEdgeDrafter

__all__ = [
    "ChainRule",
    "Draft",
    "Drafter",
    "HeadChainDrafter",
    "HybridDrafter",
    "NullDrafter",
    "ProactiveDrafter",
    "ProactiveSpecEdgeDrafter",
    "SlmChainDrafter",
    "SpecEdgeDrafter",
    "TreeRule",
]
