"""Drafters: what proposes a tree for the next round. `systems` says which one a system uses."""

from hyco_export.device.drafters.drafter import Draft, Drafter, NullDrafter, ProactiveDrafter
from hyco_export.device.drafters.head_chain import HeadChainDrafter
from hyco_export.device.drafters.hybrid import HybridDrafter
from hyco_export.device.drafters.slm_chain import SlmChainDrafter
from hyco_export.device.drafters.specedge import ProactiveSpecEdgeDrafter, SpecEdgeDrafter
from hyco_export.device.tree_builder import TreeRule

__all__ = [
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
