"""A drafter that knows the answer, to prove the loop with."""

from collections.abc import Callable, Sequence

from hyco_export.device.drafters.drafter import Draft
from hyco_export.device.interfaces import Given
from hyco_export.protocol.tree import ROOT, Source, Tree


class OracleDrafter:
    """Proposes the chain that somebody who knows the answer gives: it must reach MAT = depth + 1, or the loop is wrong.

    Args:
        continuation: the next `depth` tokens after the given ids.
        depth: nodes of the chain.
    """

    def __init__(self, continuation: Callable[[Sequence[int], int], Sequence[int]], depth: int) -> None:
        self._continuation = continuation
        self._depth = depth

    def begin(self, ids: Sequence[int], given: Given) -> None:
        pass

    def propose(self, ids: Sequence[int]) -> Draft:
        tokens = tuple(self._continuation(ids, self._depth))
        count = len(tokens)
        return Draft(Tree(tokens, tuple(range(ROOT, count - 1)), (0.0,) * count, (Source.CHAIN,) * count))

    def observe(self, accepted: Sequence[int], ids: Sequence[int], given: Given) -> None:
        pass
