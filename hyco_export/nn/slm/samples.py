"""Sample passes of the SLM as they occur on a device: forests and prefill on rings that hold text. Real values.

What the emulator is later compared on. Knows the float passes; the integers are made by the caller.
"""

from collections.abc import Sequence

import numpy as np

from hyco_export.core.network.slm_host import NO_PARENT, EmbeddingRows, Opening, SlmHost
from hyco_export.nn.slm.static_pass import FloatSlm

Ids = Sequence[int]


def random_forest(rows: int, generator: np.random.Generator) -> list[int]:
    """Parents of `rows` nodes, each any earlier node or none."""
    return [NO_PARENT if row == 0 else int(generator.integers(NO_PARENT, row)) for row in range(rows)]


def tree_samples(
    slm: FloatSlm,
    embeddings: EmbeddingRows,
    sequences: Sequence[Ids],
    rows: int,
    mask_value: float,
    seed: int,
    opening: Opening | None = None,
) -> list[dict[str, np.ndarray]]:
    """Feeds of one forest per sequence: its first pass of tokens is in the rings, the nodes are tokens of its text."""
    generator = np.random.default_rng(seed)
    samples = []
    for ids in sequences:
        host = SlmHost(slm.network, embeddings, rows, mask_value, opening=opening)
        host.append(slm.tree, ids[:rows])
        tokens = generator.choice(np.asarray(ids), rows)
        samples.append(host.feeds(tokens, random_forest(rows, generator)))
    return samples


def prefill_samples(
    slm: FloatSlm,
    embeddings: EmbeddingRows,
    sequences: Sequence[Ids],
    rows: int,
    mask_value: float,
    opening: Opening | None = None,
) -> list[dict[str, np.ndarray]]:
    """Feeds of the second prefill pass of each sequence (its text repeated where it is too short)."""
    samples = []
    for ids in sequences:
        tokens = np.resize(np.asarray(ids), 2 * rows)
        host = SlmHost(slm.network, embeddings, rows, mask_value, opening=opening)
        host.append(slm.prefill, tokens[:rows])
        samples.append(host.feeds(tokens[rows:], range(NO_PARENT, rows - 1)))
    return samples
