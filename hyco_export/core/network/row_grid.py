"""Symmetric 8-bit integers with one scale per row: how embedding tables are stored. Values only."""

from typing import NamedTuple

import numpy as np

from hyco_export.core.encodings import symmetric_limits

_, INT8_MAX = symmetric_limits(8)


class QuantizedRows(NamedTuple):
    """real = integers * scale: integers int8 [n, H], scale float32 [n]."""

    integers: np.ndarray
    scale: np.ndarray


def quantize_rows(real: np.ndarray) -> QuantizedRows:
    """Symmetric 8 bits with one scale per row of real [n, H]: the largest magnitude of a row becomes 127."""
    magnitude = np.abs(real).max(axis=1)
    scale = np.maximum(magnitude / np.float32(INT8_MAX), np.finfo(np.float32).tiny).astype(np.float32)
    return QuantizedRows(np.rint(real / scale[:, None]).astype(np.int8), scale)
