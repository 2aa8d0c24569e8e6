"""What a drafter is: the methods that the driver calls; the one that drafts nothing; what those with an SLM share."""

from collections.abc import Iterator, Sequence
from typing import Protocol, runtime_checkable

import msgspec

from hyco_export.device.interfaces import Given
from hyco_export.device.tree_builder import SlmState, TreeBuilder
from hyco_export.protocol.tree import EMPTY_TREE, Tree


class Draft(msgspec.Struct, frozen=True):
    """A proposal and what it cost on the device."""

    tree: Tree
    head_ms: float = 0.0
    slm_ms: float = 0.0
    reused: int = 0  # nodes of the tree that were grown while the last reply was on its way


class Drafter(Protocol):
    """Proposes trees. `ids` are all committed ids, the root last."""

    def begin(self, ids: Sequence[int], given: Given) -> None:
        """A session was primed (or primed again): forget everything and take up these ids."""
        ...

    def propose(self, ids: Sequence[int]) -> Draft:
        """A tree under the root; called once for every root."""
        ...

    def observe(self, accepted: Sequence[int], ids: Sequence[int], given: Given) -> None:
        """The last proposal's accepted rows, depth 1 first; `ids` now end with the new root."""
        ...


@runtime_checkable
class ProactiveDrafter(Drafter, Protocol):
    """One that can draft on while the verdict on its last proposal is on its way."""

    def draft_ahead(self) -> Iterator[None]:
        """Passes towards the next tree, one at every `next`; may be left at any of them, and called again."""
        ...


class NullDrafter:
    """Proposes nothing: the server decodes plainly, or drafts with its own head (Cloud+MTP)."""

    def begin(self, ids: Sequence[int], given: Given) -> None:
        pass

    def propose(self, ids: Sequence[int]) -> Draft:
        return Draft(EMPTY_TREE)

    def observe(self, accepted: Sequence[int], ids: Sequence[int], given: Given) -> None:
        pass


class SlmDrafter:
    """What drafters with an SLM do before and after a proposal; each has a `propose` of its own.

    Args:
        slm: its rings follow the committed tokens.
    """

    def __init__(self, slm: SlmState) -> None:
        self._slm = slm
        self._builder: TreeBuilder | None = None  # of the last proposal

    def begin(self, ids: Sequence[int], given: Given) -> None:
        self._slm.begin(ids)

    def observe(self, accepted: Sequence[int], ids: Sequence[int], given: Given) -> None:
        assert self._builder is not None  # a verdict follows a proposal
        self._builder.commit(accepted)
        self._slm.forget()
