"""The tokens that a right server draws with a seed, by PROTOCOL.md ("The draw") and transformers' distributions.

A reference of its own: the server's sampling code is judged by it and has no part in it.

Legend: V vocabulary, R rows of a golden tree.
"""

from collections.abc import Iterator, Sequence
from functools import cached_property

import numpy as np

from hyco_export.core.golden import GoldenDraw

SEEDS_STORED = (
    24  # of a sampling: a server that draws otherwise misses a root of probability 1/2 with all of them never
)
SEEDS_TRIED = 2000  # a root of probability 0.01 is drawn by 20 of them
NEAR_CUT = 0.5  # nats: a token this close to a cut may fall on its other side in bfloat16
LOW_BITS = 11  # of 64, which a number of 53 bits leaves out
MARGIN_DIGITS = 6


class Ruler:
    """One row's distribution as a ruler: [0, 1) divided among the tokens in ascending order of ids.

    Args:
        log_probs: float64 [V], nothing cut.
        kept: bool [V], the tokens that transformers' warpers leave.
        edges: [V], how far log p is from the cut; below 0 outside it.
    """

    def __init__(self, log_probs: np.ndarray, kept: np.ndarray, edges: np.ndarray) -> None:
        self._log_probs, self._kept, self._edges = log_probs, kept, edges

    def draw(self, number: float) -> tuple[int, float]:
        """The token at a number in [0, 1), and how far the nearest other token is.

        Where a token lies close to the cut, its other side counts too: the distance is the least of both rulers, 0
        where they disagree.
        """
        found = [_at(ends, number) for ends in self._ends]
        token = found[0][0]
        margin = min(margin if each == token else 0.0 for each, margin in found)
        return token, round(min(margin, 1.0), MARGIN_DIGITS)

    @cached_property
    def _ends(self) -> list[np.ndarray]:
        """Where each token's part ends, float64 [V], by the cut and by those one token wider and narrower."""
        probs = np.exp(self._log_probs)
        sums = [np.cumsum(np.where(kept, probs, 0.0)) for kept in self._cuts()]
        return [each / each[-1] for each in sums]

    def _cuts(self) -> Iterator[np.ndarray]:
        yield self._kept
        last = int(np.where(self._kept, self._log_probs, np.inf).argmin())
        first_out = int(np.where(self._kept, -np.inf, self._log_probs).argmax())
        for token, stays in ((last, self._kept.sum() > 1), (first_out, not self._kept[first_out])):
            if stays and np.isfinite(self._log_probs[token]) and abs(self._edges[token]) < NEAR_CUT:
                other = self._kept.copy()
                other[token] = not other[token]
                yield other


def _at(ends: np.ndarray, number: float) -> tuple[int, float]:
    """Token and distance; the outer ends of the ruler border on no other token."""
    token = int(np.searchsorted(ends, number, side="right"))
    begin = ends[token - 1] if token else 0.0
    below = number - begin if begin > 0.0 else np.inf
    above = ends[token] - number if ends[token] < ends[-1] else np.inf
    return token, float(min(below, above))


def draw_number(seed: int, position: int, row: int) -> float:
    """u of a row: element `row` of the Philox stream with the key (seed, position)."""
    stream = np.random.Philox(key=np.array([seed, position], np.uint64)).random_raw(row + 1)
    return float(int(stream[row]) >> LOW_BITS) * 2.0**-53


def golden_draws(root: int, position: int, rows: Sequence[int], rulers: Sequence[Ruler]) -> tuple[GoldenDraw, ...]:
    """Draws of the first seeds that draw the root; fewer, or none, where it is unlikely.

    Args:
        root, position: the tree's root.
        rows: R rows of the tree, one at each depth from 0 on.
        rulers: of the row before the root, then of `rows`.
    """
    found: list[GoldenDraw] = []
    for seed in range(SEEDS_TRIED):
        token, root_margin = rulers[0].draw(draw_number(seed, position - 1, 0))
        if token != root:
            continue
        drawn = [
            ruler.draw(draw_number(seed, position + depth, row))
            for depth, (row, ruler) in enumerate(zip(rows, rulers[1:], strict=True))
        ]
        tokens, margins = zip(*drawn, strict=True)
        found.append(GoldenDraw(seed, root_margin, tokens, margins))
        if len(found) == SEEDS_STORED:
            break
    return tuple(found)
