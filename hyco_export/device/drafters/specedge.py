"""SpecEdge-style drafters: a tree that the SLM alone builds, one pass a level (Park et al. 2025; HyCo, §4.2).

`ProactiveSpecEdgeDrafter` goes on drafting while the verdict on its tree is on its way.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from hyco_export.device.backends import Device
from hyco_export.device.drafters.drafter import Draft, SlmDrafter
from hyco_export.device.interfaces import Given
from hyco_export.device.systems import Settings
from hyco_export.device.tree_builder import SlmState, TreeBuilder, TreeRule
from hyco_export.protocol.tree import path_to


class SpecEdgeDrafter(SlmDrafter):
    """Each pass forwards the best nodes without children, as many as fit, and keeps the best `budget` nodes overall.

    Args:
        slm: its rings follow the committed tokens.
        rule: scores, budget and passes; it stops earlier when no new child beats the last node kept.
    """

    def __init__(self, slm: SlmState, rule: TreeRule) -> None:
        super().__init__(slm)
        self._rule = rule

    def propose(self, ids: Sequence[int]) -> Draft:
        base = self._slm.base(ids, nodes=0)
        self._builder = builder = TreeBuilder(self._slm, base)
        if self._grow(builder):
            builder.settle_base()
            self._grow_for(builder, self._rule.passes - 1)
        return Draft(builder.tree, 0.0, builder.slm_ms)

    def _grow_for(self, builder: TreeBuilder, passes: int) -> None:
        for _ in range(passes):
            if not self._grow(builder):
                break

    def _grow(self, builder: TreeBuilder) -> bool:
        """One pass; did it change the tree?"""
        before = builder.tree
        nodes = builder.fitting(builder.unexpanded())
        if not nodes:
            return False
        builder.expand(nodes, self._rule.edges)
        builder.trim(self._rule.budget)
        return builder.tree != before


class Guess(NamedTuple):
    """The verdict that is expected: these rows of the sent tree, then this token; and the tree grown behind it."""

    path: tuple[int, ...]
    bonus: int
    builder: TreeBuilder


class ProactiveSpecEdgeDrafter(SpecEdgeDrafter):
    """`drafter.ProactiveDrafter`: at most as many passes ahead as a round has.

    Whether they count among the next round's passes is a reading (`TreeRule.counts_ahead`): where they do not, trees
    after a hit are deeper, as HyCo's Table 2 has them (MAT 3.69 with, 3.53 without).
    """

    def __init__(self, slm: SlmState, rule: TreeRule) -> None:
        super().__init__(slm, rule)
        self._guess: Guess | None = None
        self._next: TreeBuilder | None = None  # the tree that a right guess left
        self._passes_ahead = 0

    def begin(self, ids: Sequence[int], given: Given) -> None:
        super().begin(ids, given)
        self._guess = self._next = None

    def propose(self, ids: Sequence[int]) -> Draft:
        builder, self._next = self._next, None
        if builder is None:
            self._passes_ahead = 0
            return super().propose(ids)
        self._builder = builder
        reused, spent_ms = len(builder.tree), builder.slm_ms
        left = self._rule.passes - (self._passes_ahead if self._rule.counts_ahead else 0)
        self._passes_ahead = 0
        self._grow_for(builder, left)
        return Draft(builder.tree, 0.0, builder.slm_ms - spent_ms, reused)

    def draft_ahead(self) -> Iterator[None]:
        assert self._builder is not None  # there is a verdict to wait for
        if self._guess is None:
            leaves = self._builder.fitting(self._builder.unexpanded())
            if leaves:
                self._builder.forward(leaves)
                yield
            self._guess = self._best_guess(self._builder)
        while self._guess is not None and self._passes_ahead < self._rule.passes:
            self._passes_ahead += 1
            if not self._grow(self._guess.builder):
                return
            yield

    def observe(self, accepted: Sequence[int], ids: Sequence[int], given: Given) -> None:
        guess, self._guess = self._guess, None
        right = guess is not None and (tuple(accepted), ids[-1]) == (guess.path, guess.bonus)
        if guess is None or not right or not guess.builder.base_rows:
            self._passes_ahead = 0
            super().observe(accepted, ids, given)
            return
        guess.builder.settle_base()  # the accepted path and the new root
        self._slm.forget(guess.builder.oldest_row())
        self._next = guess.builder

    def _best_guess(self, builder: TreeBuilder) -> Guess | None:
        best = builder.best_guess()
        if best is None:
            return None
        leaf, bonus = best
        path = path_to(builder.tree.parents, leaf)
        base = [*(builder.tree.tokens[row] for row in path), bonus]
        return Guess(path, bonus, TreeBuilder(self._slm, base))


def make_specedge(device: Device, settings: Settings) -> SpecEdgeDrafter:
    """Waits for every verdict."""
    slm = SlmState(device.slm, device.slm_ids, settings.stop_ids)
    return SpecEdgeDrafter(slm, TreeRule.of_specedge(settings.drafting))


def make_proactive(device: Device, settings: Settings) -> ProactiveSpecEdgeDrafter:
    """Drafts on meanwhile."""
    slm = SlmState(device.slm, device.slm_ids, settings.stop_ids)
    return ProactiveSpecEdgeDrafter(slm, TreeRule.of_specedge(settings.drafting))
