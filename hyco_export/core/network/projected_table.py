"""The kept embedding table multiplied beforehand with its half of the head's first matrix. Values only.

Looking a row up and multiplying it with the embedding half [M, H] of the pre-projection gives the same as looking up a
row of the product [C, M]: for the assistant of Gemma 4 26B-A4B 1,024 bytes a row instead of 2,816, and one product less
a step. It costs a second rounding to 8 bits, of the products. Not in the paper, whose table has the embeddings.

Legend: C kept rows, H the verifier's hidden size, M the head's.
"""

from typing import NamedTuple

import numpy as np

from hyco_export.core.network.head import EMBEDDING_HALF, PRE_PROJECTION, PROJECTED_TABLE, STATE_HALF, TABLE
from hyco_export.core.network.kept_table import ZERO_POINT
from hyco_export.core.network.row_grid import quantize_rows
from hyco_export.core.network.weights import IntegerMatrix, IntegerTable, Weights

CHUNK_ROWS = 4096  # 46 MB of float32 at H = 2,816


class Projected(NamedTuple):
    """Weights for `HeadNetwork.projected_table`, and what the second rounding costs: signal to noise of the rows."""

    weights: Weights
    sqnr_db: float


def project_table(weights: Weights) -> Projected:
    """Both halves of the first matrix on their own, and the table of products in place of the embeddings."""
    matrices = dict(weights.matrices)
    if PRE_PROJECTION in matrices:  # some heads store it in two
        whole = matrices.pop(PRE_PROJECTION)
        if isinstance(whole, np.ndarray):
            raise ValueError(f"{PRE_PROJECTION} is in float; a table of products needs integers")
        width = whole.integers.shape[1] // 2
        matrices[EMBEDDING_HALF], matrices[STATE_HALF] = whole.columns(0, width), whole.columns(width, 2 * width)
    embedding = matrices[EMBEDDING_HALF]
    assert isinstance(embedding, IntegerMatrix), EMBEDDING_HALF
    table, sqnr_db = _products(weights.tables[TABLE], embedding.real())
    tables = {name: kept for name, kept in weights.tables.items() if name != TABLE}
    return Projected(Weights(matrices, weights.vectors, {**tables, PROJECTED_TABLE: table}), sqnr_db)


def _products(table: IntegerTable, matrix: np.ndarray) -> tuple[IntegerTable, float]:
    """Rows [C, H] times the transposed matrix [M, H], 8 bits a row, and the signal to noise ratio of that in dB."""
    count = len(table.integers)
    integers = np.empty((count, len(matrix)), np.uint8)
    scales = np.empty(count, np.float32)
    signal = noise = 0.0
    for start in range(0, count, CHUNK_ROWS):
        rows = np.arange(start, min(start + CHUNK_ROWS, count))
        exact = table.real(rows) @ matrix.T  # [n, M]
        rounded = quantize_rows(exact)
        integers[rows] = (rounded.integers.astype(np.int16) + ZERO_POINT).astype(np.uint8)
        scales[rows] = rounded.scale
        signal += float(np.sum(exact**2, dtype=np.float64))
        difference = rounded.integers.astype(np.float32) * rounded.scale[:, None] - exact
        noise += float(np.sum(difference**2, dtype=np.float64))
    least = np.finfo(float).tiny  # of embeddings, or a projection, of zeros
    decibel = 10.0 * float(np.log10(max(signal, least) / max(noise, least)))
    return IntegerTable(integers, scales, ZERO_POINT), decibel
