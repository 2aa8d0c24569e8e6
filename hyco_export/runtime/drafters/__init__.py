"""Drafters: what proposes a tree for the next round. One small class a file; which one a system uses: `systems`."""

from hyco_export.runtime.drafters.drafter import Draft, Drafter
from hyco_export.runtime.drafters.hybrid import HybridDrafter, TreeRule
from hyco_export.runtime.drafters.null import NullDrafter
from hyco_export.runtime.drafters.oracle import OracleDrafter
from hyco_export.runtime.drafters.specedge import SpecEdgeDrafter

__all__ = ["Draft", "Drafter", "HybridDrafter", "NullDrafter", "OracleDrafter", "SpecEdgeDrafter", "TreeRule"]
