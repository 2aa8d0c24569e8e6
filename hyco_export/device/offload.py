"""Offload policies: which drafted tokens the device commits by itself, and which go to the verifier.

Every policy but `AskForAll` gives up losslessness: the tokens that it keeps were drawn by no verifier, and the trace
marks them as unverified.
"""

import math
from typing import Protocol

from hyco_export.core.recipe import Synera
from hyco_export.protocol.tree import ROOT, Tree


class OffloadPolicy(Protocol):
    """`asks`: does it ever ask the server? Where it does not, no session is opened. `keeps`: does it ever not ask?"""

    @property
    def asks(self) -> bool: ...

    @property
    def keeps(self) -> bool: ...

    def keep(self, tree: Tree, unsent: int) -> tuple[int, ...]:
        """Rows of a path of `tree`, depth 1 first, that are committed unasked.

        unsent: tokens kept earlier that the server does not know yet.
        """
        ...


class AskForAll:
    """Every token goes to the verifier."""

    asks = True
    keeps = False

    def keep(self, tree: Tree, unsent: int) -> tuple[int, ...]:
        return ()


class AskForNone:
    """The device answers alone: the best chain of every tree is committed."""

    asks = False
    keeps = True

    def keep(self, tree: Tree, unsent: int) -> tuple[int, ...]:
        return best_line(tree)


class KeepConfident:
    """Synera's selective offload (Wang et al. 2025; HyCo, §2): tokens whose confidence clears a threshold stay on the
    device, the first that does not and all behind it are verified.

    Args:
        options: q(token) of a kept token is at least `confidence`, and at most `unverified` are kept in a row. A node's
            q is the difference of its score and its parent's, so the drafter's edges must cost nothing.
    """

    asks = True
    keeps = True

    def __init__(self, options: Synera) -> None:
        self._options = options

    def keep(self, tree: Tree, unsent: int) -> tuple[int, ...]:
        kept: list[int] = []
        least = math.log(self._options.confidence)
        for row in best_line(tree)[: max(0, self._options.unverified - unsent)]:
            parent = tree.parents[row]
            if tree.log_probs[row] - (tree.log_probs[parent] if parent != ROOT else 0.0) < least:
                break
            kept.append(row)
        return tuple(kept)


def best_line(tree: Tree) -> tuple[int, ...]:
    """The best child under the root, its best child, and so on."""
    line: list[int] = []
    parent = ROOT
    while children := [row for row, above in enumerate(tree.parents) if above == parent]:
        parent = max(children, key=lambda row: (tree.log_probs[row], -row))
        line.append(parent)
    return tuple(line)
