"""How much text a keep set of each size covers: ids in the order in which they are taken, and the curve over sizes.

Pure arithmetic on counts; no tokenizer and no files. Legend: V vocabulary size.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

CURVE_POINTS = 96  # sizes of a drawn curve, evenly spaced in the logarithm


@dataclass(frozen=True)
class Ranking:
    """Ids in the order in which a growing keep set takes them.

    order: int32, V at most; the first `fixed` are always kept, those up to `known` are fixed or were seen in the text.
    """

    order: np.ndarray
    fixed: int
    known: int


def rank(counts: np.ndarray, fixed: np.ndarray, placeholders: np.ndarray, never: np.ndarray | None = None) -> Ranking:
    """Fixed ids (bool [V]), then by falling counts [V]; equal counts give way to the smaller id.

    Small ids are the earlier merges of a tokenizer, so also the likelier ones where nothing was counted. Placeholders
    (bool [V], entries without a text) come last whatever their id; ids that are `never` kept (bool [V]) do not come.
    """
    ids = np.arange(len(counts))
    unseen = counts == 0
    never = np.zeros(len(counts), dtype=bool) if never is None else never
    order = np.lexsort((ids, -counts, placeholders & unseen, ~fixed))  # the last key counts most
    order = order[~never[order]]
    size = int(fixed.sum())
    return Ranking(order.astype(np.int32), size, size + int((~fixed & ~unseen & ~never).sum()))


def kept_share(ranking: Ranking, counts: np.ndarray) -> np.ndarray:
    """float64 [len(order) + 1]: share of counted tokens [V] inside the first n ids; zeros where nothing was counted."""
    inside = np.concatenate([[0], np.cumsum(counts[ranking.order])])
    return inside / max(int(counts.sum()), 1)


def smallest_size(ranking: Ranking, shares: np.ndarray, wanted: float) -> int | None:
    """The smallest size, fixed part included, whose share [V + 1] reaches `wanted`; None where no known ids do.

    Ids that were never seen have no order worth the name: growing into them is not choosing.
    """
    reached = np.flatnonzero(shares[ranking.fixed : ranking.known + 1] >= wanted)
    return ranking.fixed + int(reached[0]) if len(reached) else None


def curve(ranking: Ranking, held_out: np.ndarray, counted: np.ndarray, chosen: int) -> list[dict[str, Any]]:
    """Rows `size, held_out_share, counted_share` from the fixed part to the whole vocabulary, `chosen` among them."""
    sizes = np.geomspace(max(ranking.fixed, 1), len(ranking.order), CURVE_POINTS).round().astype(np.int64)
    sizes = np.unique(np.concatenate([sizes, [ranking.known, chosen]]))
    held_out_share, counted_share = kept_share(ranking, held_out), kept_share(ranking, counted)
    return [
        {"size": int(n), "held_out_share": float(held_out_share[n]), "counted_share": float(counted_share[n])}
        for n in sizes
    ]
