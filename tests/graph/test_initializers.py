"""Integers written into ONNX and read back are the same integers, whatever their width and count."""

import numpy as np
import onnx
import pytest

from hyco_export.core.network.weights import IntegerMatrix
from hyco_export.graph.writer import carried_matrix, read_weight, weight_tensor


@pytest.mark.parametrize(
    ("bits", "kind"), [(2, onnx.TensorProto.INT4), (4, onnx.TensorProto.INT4), (8, onnx.TensorProto.INT8)]
)
@pytest.mark.parametrize("shape", [(3, 4), (3, 5), (1, 1)])
def test_round_trip(bits: int, kind: int, shape: tuple[int, int]) -> None:
    low, high = -(2 ** (bits - 1)), 2 ** (bits - 1)
    integers = np.random.default_rng(0).integers(low, high, shape).astype(np.int8)
    integers.flat[0] = low
    tensor = weight_tensor("w", integers, bits)
    assert tensor.data_type == kind
    assert np.array_equal(read_weight(tensor), integers)
    assert np.array_equal(onnx.numpy_helper.to_array(tensor).astype(np.int8), integers)  # as onnx itself reads it


def test_a_matrix_brings_scales_and_zeros_per_output_channel() -> None:
    matrix = IntegerMatrix(np.ones((5, 3), np.int8), np.arange(5, dtype=np.float32), 4)
    weight, scale, zero = carried_matrix("w", matrix)
    assert list(weight.dims) == [5, 3]
    assert onnx.numpy_helper.to_array(scale).tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert zero.data_type == weight.data_type
    assert read_weight(zero).tolist() == [0] * 5
