"""Integer initializers of an ONNX graph, packed as ONNX wants them, and read back. Knows no graph."""

from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from hyco_export.core.network.weights import IntegerMatrix
from hyco_export.graph.external_data import raw_bytes

CARRIERS = {2: TensorProto.INT4, 4: TensorProto.INT4, 8: TensorProto.INT8}
"""ONNX type by width in the checkpoint. 2-bit integers travel as INT4, values unchanged: INT2 gives noise on HTP."""


def integer_tensor(name: str, values: np.ndarray) -> onnx.TensorProto:
    """values of a numpy integer dtype, as they are."""
    return numpy_helper.from_array(np.ascontiguousarray(values), name)


def weight_tensor(name: str, integers: np.ndarray, bits: int) -> onnx.TensorProto:
    """int8 values [...] that fit `bits` -> INT4 (two per byte, low half first) or INT8."""
    kind = CARRIERS[bits]
    flat = np.ascontiguousarray(integers, np.int8).reshape(-1)
    if kind == TensorProto.INT4:
        flat = pack_int4(flat)
    return helper.make_tensor(name, kind, integers.shape, flat.tobytes(), raw=True)


def pack_int4(flat: np.ndarray) -> np.ndarray:
    """int8 [n] in -8..7 -> uint8 [ceil(n / 2)]."""
    halves = np.zeros(len(flat) + len(flat) % 2, np.uint8)
    halves[: len(flat)] = flat.astype(np.uint8) & 0x0F
    return halves[0::2] | (halves[1::2] << 4)


def read_weight(tensor: onnx.TensorProto, folder: Path | None = None) -> np.ndarray:
    """int8 values [...] of an INT4 or INT8 initializer; `folder` holds its external data, if it has some."""
    shape = tuple(tensor.dims)
    raw = raw_bytes(tensor, folder)
    if tensor.data_type == TensorProto.INT8:
        return raw.view(np.int8).reshape(shape)
    halves = np.empty((len(raw), 2), np.uint8)  # filled in place: an output layer has 132 million values
    np.bitwise_and(raw, 0x0F, out=halves[:, 0])
    np.right_shift(raw, 4, out=halves[:, 1])
    halves ^= 8
    signed = halves.view(np.int8)
    signed -= 8
    return signed.reshape(-1)[: int(np.prod(shape))].reshape(shape)


def matrix_parameters(name: str) -> tuple[str, str]:
    """Names of the scales and zero points of the linear layer `name`."""
    return f"{name}/scale", f"{name}/zero_point"


def block_parameters(name: str) -> tuple[str, str, str, str]:
    """Names of the multipliers, their scales and zero points, and the zero points of the blocks of layer `name`."""
    return f"{name}/multiplier", f"{name}/scale", f"{name}/multiplier_zero_point", f"{name}/zero_point"


def carried_blocks(name: str, matrix: IntegerMatrix) -> list[onnx.TensorProto]:
    """A linear layer in blocks, transposed as HTP wants it: integers [K, N], multipliers [J, N], scales [N], zeros.

    Raises:
        ValueError: the matrix has one scale per output channel.
    """
    if matrix.multipliers is None:
        raise ValueError(f"{name} has no blocks")
    multiplier, scale, multiplier_zero, zero_point = block_parameters(name)
    return [
        weight_tensor(name, np.ascontiguousarray(matrix.integers.T), matrix.bits),
        integer_tensor(multiplier, matrix.multipliers.T),
        numpy_helper.from_array(matrix.scales.astype(np.float32), scale),
        integer_tensor(multiplier_zero, np.zeros(len(matrix.scales), np.uint8)),
        weight_tensor(zero_point, np.zeros(matrix.multipliers.T.shape, np.int8), matrix.bits),
    ]


def carried_matrix(name: str, matrix: IntegerMatrix) -> list[onnx.TensorProto]:
    """A linear layer's three initializers: integers [N, K], scales [N], zero points [N] (all 0, as HTP wants them)."""
    scale, zero_point = matrix_parameters(name)
    return [
        weight_tensor(name, matrix.integers, matrix.bits),
        numpy_helper.from_array(matrix.scales.astype(np.float32), scale),
        weight_tensor(zero_point, np.zeros(len(matrix.scales), np.int8), matrix.bits),
    ]
