"""Weights of a static network: integers with their scales, by name; and the head's embedding tables.

A head looks up the keep set's 8-bit embedding table, or that table multiplied beforehand with the embedding half of the
head's first matrix (`project_table`): a smaller table, and one product less a step.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from safetensors import SafetensorError, safe_open

from hyco_export.core.encodings import pack_rows, packed_width, quantize_rows, unpack_rows
from hyco_export.core.keepset import KEEPSET_FILE
from hyco_export.core.network.head import EMBEDDING_HALF, PRE_PROJECTION, PROJECTED_TABLE, STATE_HALF, TABLE
from hyco_export.core.numerics import decibels
from hyco_export.errors import ArtifactError

MULTIPLIER_BITS = 4  # of a block's scale: HTP's low-power blocks know 1 .. 16
LARGEST_MULTIPLIER = 2**MULTIPLIER_BITS
ZERO_POINT = 128  # int8 rows become uint8: HTP gathers unsigned tables
CHUNK_ROWS = 4096  # of a table being multiplied: 46 MB of float32 at H = 2,816


@dataclass(frozen=True)
class IntegerMatrix:
    """A linear layer's weight: real[n, k] = integers[n, k] * scales[n], symmetric, one scale per output channel.

    With multipliers (low-power block quantisation, LPBQ) the K inputs stand in J blocks of equal size, and
    real[n, k] = integers[n, k] * (multipliers[n, block of k] * scales[n]).

    Attributes:
        integers: int8 [N, K], each within the signed range of `bits`.
        scales: float32 [N].
        bits: 2, 4 or 8, the width in the checkpoint (a graph may carry it in a wider type).
        multipliers: uint8 [N, J], each in 1 .. LARGEST_MULTIPLIER; None for one scale per output channel.
    """

    integers: np.ndarray
    scales: np.ndarray
    bits: int
    multipliers: np.ndarray | None = None

    @property
    def block(self) -> int:
        """Inputs that share a scale."""
        blocks = 1 if self.multipliers is None else self.multipliers.shape[1]
        return int(self.integers.shape[1] // blocks)

    @property
    def stored_bytes(self) -> int:
        """Bytes on the device: packed integers, float32 scales, multipliers of half a byte."""
        blocks = 0 if self.multipliers is None else self.multipliers.size
        return (self.integers.size * self.bits + blocks * MULTIPLIER_BITS) // 8 + 4 * self.scales.size

    def real(self) -> np.ndarray:
        """float32 [N, K]."""
        if self.multipliers is None:
            factors = self.scales[:, None]
        else:
            blocks = self.multipliers.astype(np.float32) * self.scales[:, None]  # [N, J]
            factors = np.repeat(blocks, self.block, axis=1)
        real = self.integers.astype(np.float32)
        real *= factors  # in place: an output layer of 262,144 rows is a gigabyte
        return real

    def columns(self, start: int, stop: int) -> "IntegerMatrix":
        """These inputs alone; with blocks, whole ones.

        Raises:
            ValueError: a block would be cut.
        """
        integers = np.ascontiguousarray(self.integers[:, start:stop])
        if self.multipliers is None:
            return IntegerMatrix(integers, self.scales, self.bits)
        if start % self.block or stop % self.block:
            raise ValueError(f"columns {start} .. {stop} cut blocks of {self.block}")
        multipliers = np.ascontiguousarray(self.multipliers[:, start // self.block : stop // self.block])
        return IntegerMatrix(integers, self.scales, self.bits, multipliers)

    def rows(self, chosen: np.ndarray) -> "IntegerMatrix":
        """These output channels alone."""
        multipliers = None if self.multipliers is None else self.multipliers[chosen]
        return IntegerMatrix(self.integers[chosen], self.scales[chosen], self.bits, multipliers)

    def packed(self) -> "PackedMatrix":
        """The stored form.

        Raises:
            ValueError: it has scales by block of inputs.
        """
        if self.multipliers is not None:
            raise ValueError("a matrix in blocks has no packed form")
        return PackedMatrix(pack_rows(self.integers, self.bits), self.scales, self.bits, self.integers.shape[1])


@dataclass(frozen=True)
class PackedMatrix:
    """A linear layer's weight as it is stored (`core.encodings.pack_rows`).

    Attributes:
        integers: uint8 [N, bytes of a row]; int8 [N, K] for 8 bits.
        scales: float32 [N].
        bits: 2, 4 or 8.
        width: K.
    """

    integers: np.ndarray
    scales: np.ndarray
    bits: int
    width: int

    def unpacked(self) -> IntegerMatrix:
        """One value per byte."""
        return IntegerMatrix(unpack_rows(self.integers, self.bits, self.width), self.scales, self.bits)


@dataclass(frozen=True)
class MatrixShape:
    """What is known of a linear layer before it is read."""

    rows: int  # N
    width: int  # K
    bits: int

    @property
    def stored(self) -> tuple[str, tuple[int, int]]:
        """numpy type and shape of its packed integers."""
        return ("int8" if self.bits == 8 else "uint8"), (self.rows, packed_width(self.width, self.bits))


class PackedMatrices(Mapping[str, IntegerMatrix]):
    """Linear layers that stay in their file: each is read and unpacked at every use.

    Args:
        shapes: of every layer, in a fixed order.
        read: gives one in its stored form; called at every use.
    """

    def __init__(self, shapes: Mapping[str, MatrixShape], read: Callable[[str], PackedMatrix]) -> None:
        self.shapes = shapes
        self.packed = read

    def __getitem__(self, name: str) -> IntegerMatrix:
        if name not in self.shapes:
            raise KeyError(name)
        return self.packed(name).unpacked()

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)

    @property
    def value_count(self) -> int:
        """Weights of all layers."""
        return sum(shape.rows * shape.width for shape in self.shapes.values())


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
    zero_point: int = ZERO_POINT

    def real(self, rows: np.ndarray) -> np.ndarray:
        """float32 [..., H] for rows [...]."""
        real: np.ndarray = (self.integers[rows].astype(np.float32) - self.zero_point) * self.scales[rows][..., None]
        return real


@dataclass(frozen=True)
class Weights:
    """Everything a network reads by name.

    Attributes:
        matrices: linear layers, in memory or read at every use (`PackedMatrices`); a float32 [N, K] array is accepted
            by the torch backend only (a network in float).
        vectors: float32 [n], scales of norms.
        tables: embedding tables looked up inside the graph.
    """

    matrices: Mapping[str, IntegerMatrix | np.ndarray]
    vectors: Mapping[str, np.ndarray]
    tables: Mapping[str, IntegerTable]

    def integer_matrices(self) -> dict[str, IntegerMatrix]:
        """The linear layers in integers."""
        return {name: matrix for name, matrix in self.matrices.items() if isinstance(matrix, IntegerMatrix)}


def read_kept_table(folder: Path) -> IntegerTable:
    """The embedding table of a `build-keepset` artifact: rows in keep-set order, the embedding's factor in the scales.

    Raises:
        ArtifactError: the file is missing, damaged or holds no table.
    """
    path = folder / KEEPSET_FILE
    try:
        with safe_open(path, framework="numpy") as stored:
            signed, scales = stored.get_tensor("table"), stored.get_tensor("table_scale")
    except (OSError, SafetensorError) as error:
        raise ArtifactError(
            f"{path} holds no embedding table: {error}", "build it again: hyco-export build-keepset"
        ) from error
    return IntegerTable((signed.astype(np.int16) + ZERO_POINT).astype(np.uint8), scales, ZERO_POINT)


class Projected(NamedTuple):
    """Weights for `HeadNetwork.projected_table`, and the SQNR of the second rounding of its rows."""

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
    return IntegerTable(integers, scales, ZERO_POINT), decibels(signal, noise)
