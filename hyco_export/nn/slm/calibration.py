"""Ranges of the SLM's tensors over calibration text. Knows the float passes and sequences; the grids follow in
`core.network.slm_grids`.
"""

from collections import Counter
from collections.abc import Callable, Sequence

from hyco_export.core.network.slm_grids import kv_range_names
from hyco_export.core.network.slm_host import EmbeddingRows, Opening, SlmHost
from hyco_export.nn.range_observer import RangeObserver
from hyco_export.nn.slm.static_pass import FloatSlm

Ids = Sequence[int]


def full_passes(ids: Ids, rows: int) -> list[Ids]:
    """The sequence in passes of `rows` tokens; a rest that does not fill a pass is left out (padding is no text)."""
    return [ids[start : start + rows] for start in range(0, len(ids) - rows + 1, rows)]


def first_passes(passes: list[list[Ids]], limit: int | None) -> list[list[Ids]]:
    """At most `limit` passes: the first of every sequence, then the second of those that have one, and so on."""
    if limit is None:
        return passes
    depth = max((len(parts) for parts in passes), default=0)
    order = [(number, at) for at in range(depth) for number, parts in enumerate(passes) if at < len(parts)]
    taken = Counter(number for number, _ in order[:limit])
    return [parts[: taken[number]] for number, parts in enumerate(passes)]


def calibrated_ranges(
    slm: FloatSlm,
    embeddings: EmbeddingRows,
    sequences: Sequence[Ids],
    rows: int,
    mask_value: float,
    percentile: float,
    kv_percentile: float,
    tell: Callable[[int, int], None],
    max_passes: int | None = None,
    opening: Opening | None = None,
) -> dict[str, tuple[float, float]]:
    """(low, high) of every tensor of a tree pass that needs a range, K/V rows as (-m, m).

    Args:
        sequences: token ids; the rings start empty for each.
        rows: R of the passes.
        percentile, kv_percentile: of the values, and of the magnitudes of K and V.
        tell: done and total passes.
        opening: of every sequence, which then begin after it.
        max_passes: leave out what lies beyond, as many passes of every sequence as of the others.

    Raises:
        ValueError: no sequence fills a pass.
    """
    passes = first_passes([full_passes(ids, rows) for ids in sequences], max_passes)
    total = sum(len(parts) for parts in passes)
    if not total:
        raise ValueError(f"no calibration sequence has {rows} tokens")
    observer = RangeObserver(percentile, total, dict.fromkeys(kv_range_names(slm.network), kv_percentile))
    done = 0
    for parts in passes:
        host = SlmHost(slm.network, embeddings, rows, mask_value, opening=opening)
        for part in parts:
            host.append(lambda feeds: slm.tree(feeds, observer), part)
            done += 1
            tell(done, total)
    return observer.ranges()
