"""Weights of a static network as they are stored: integers with their scales, by name. Values only, no files."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class IntegerMatrix:
    """A linear layer's weight: real[n, k] = integers[n, k] * scales[n], symmetric, one scale per output channel.

    Attributes:
        integers: int8 [N, K], each within the signed range of `bits`.
        scales: float32 [N].
        bits: 2, 4 or 8, the width in the checkpoint (a graph may carry it in a wider type).
    """

    integers: np.ndarray
    scales: np.ndarray
    bits: int

    def real(self) -> np.ndarray:
        """float32 [N, K]."""
        return self.integers.astype(np.float32) * self.scales[:, None]


@dataclass(frozen=True)
class IntegerTable:
    """An embedding table: real[r] = (integers[r] - zero_point) * scales[r], one scale per row.

    Attributes:
        integers: uint8 [n, H].
        scales: float32 [n], any constant factor of the embedding already inside.
        zero_point: the integer that stands for 0.
    """

    integers: np.ndarray
    scales: np.ndarray
    zero_point: int = 128

    def real(self, rows: np.ndarray) -> np.ndarray:
        """float32 [..., H] for rows [...]."""
        return (self.integers[rows].astype(np.float32) - self.zero_point) * self.scales[rows][..., None]


@dataclass(frozen=True)
class Weights:
    """Everything a network reads by name.

    Attributes:
        matrices: linear layers; a float32 [N, K] array is accepted by the torch backend only (a network in float).
        vectors: float32 [n], scales of norms.
        tables: embedding tables looked up inside the graph.
    """

    matrices: Mapping[str, IntegerMatrix | np.ndarray]
    vectors: Mapping[str, np.ndarray]
    tables: Mapping[str, IntegerTable]

    def integer_matrices(self) -> dict[str, IntegerMatrix]:
        """The linear layers that are in integers."""
        return {name: matrix for name, matrix in self.matrices.items() if isinstance(matrix, IntegerMatrix)}
