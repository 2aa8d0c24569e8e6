"""Orders of conversations that a seed decides: drawing from several sources by weight, and shuffling through a window.

Pure; knows iterators and weights, no files. Equal seeds over equal sources give equal orders on every machine.
"""

from collections.abc import Iterator, Sequence
from typing import TypeVar

import numpy as np

T = TypeVar("T")
SHUFFLE_WINDOW = 10_000  # items held back to draw from: about 60 MB of UltraChat


def interleaved(sources: Sequence[Iterator[T]], weights: Sequence[float], seed: int) -> Iterator[T]:
    """Items drawn from the sources by weight; a source that ends leaves its share to the others, none repeats."""
    generator = np.random.default_rng(seed)
    open_sources, share = list(sources), np.asarray(weights, dtype=np.float64)
    while open_sources:
        index = int(np.searchsorted(np.cumsum(share) / share.sum(), generator.random(), side="right"))
        try:
            yield next(open_sources[index])
        except StopIteration:
            del open_sources[index]
            share = np.delete(share, index)


def shuffled(items: Iterator[T], seed: int, window: int = SHUFFLE_WINDOW) -> Iterator[T]:
    """Each next item drawn at random from the `window` items that come first and are not drawn yet."""
    generator = np.random.default_rng(seed)
    held: list[T] = []
    for item in items:
        if len(held) < window:
            held.append(item)
            continue
        place = int(generator.integers(window))
        held[place], item = item, held[place]
        yield item
    yield from (held[place] for place in generator.permutation(len(held)))
