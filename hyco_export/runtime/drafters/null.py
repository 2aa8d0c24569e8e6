"""The drafter of systems whose device drafts nothing."""

from collections.abc import Sequence

from hyco_export.runtime.drafters.drafter import Draft
from hyco_export.runtime.ports import Given
from hyco_export.runtime.tree import EMPTY_TREE


class NullDrafter:
    """Proposes nothing: the server decodes plainly, or drafts with its own head (Cloud+MTP)."""

    def begin(self, ids: Sequence[int], given: Given) -> None:
        pass

    def propose(self, ids: Sequence[int]) -> Draft:
        return Draft(EMPTY_TREE)

    def observe(self, accepted: Sequence[int], ids: Sequence[int], given: Given) -> None:
        pass
