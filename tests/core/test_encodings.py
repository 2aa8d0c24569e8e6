"""Quantisation parameters, packed integers: zero is exact, ends clip, halves round to even, every width comes back."""

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from transformers.integrations.gemma_quant import _unpack_int2, _unpack_int4

from hyco_export.core.encodings import (
    WIDTHS,
    Encoding,
    encoding_from_range,
    pack_rows,
    packed_width,
    symmetric_encoding,
    symmetric_limits,
    unpack_rows,
)


@example(0.0, 2.4e-39, "uint16")  # a subnormal range
@given(st.floats(-1e6, 1e6), st.floats(-1e6, 1e6), st.sampled_from(["uint8", "int8", "uint16", "int16"]))
def test_round_trip_within_half_a_step(a: float, b: float, dtype) -> None:
    encoding = encoding_from_range(min(a, b), max(a, b), dtype)
    values = np.clip(np.linspace(min(a, b), max(a, b), 50), min(a, b, 0), max(a, b, 0))
    error = np.abs(encoding.dequantize(encoding.quantize(values)) - values)
    assert np.all(error <= encoding.scale * 1.01 + 1e-6 * np.abs(values))
    assert encoding.dequantize(encoding.quantize(np.zeros(1)))[0] == 0.0


def test_rounds_half_to_even_and_clips() -> None:
    encoding = Encoding("uint8", 1.0, 128)
    np.testing.assert_array_equal(encoding.quantize(np.array([0.5, 1.5, -1e9, 1e9])), [128, 130, 0, 255])


def test_symmetric_grid_is_centred() -> None:
    assert symmetric_encoding(12.7, "uint8") == Encoding("uint8", float(np.float32(0.1)), 128)
    assert symmetric_encoding(1.0, "int8").zero_point == 0
    assert symmetric_limits(4) == (-8, 7)


def test_infinite_range_is_refused() -> None:
    with pytest.raises(ValueError, match="not finite"):
        encoding_from_range(0.0, float("inf"), "uint8")


@given(bits=st.sampled_from(WIDTHS), rows=st.integers(1, 4), width=st.integers(1, 11), seed=st.integers(0, 99))
def test_round_trip(bits: int, rows: int, width: int, seed: int) -> None:
    low, high = -(2 ** (bits - 1)), 2 ** (bits - 1)
    integers = np.random.default_rng(seed).integers(low, high, (rows, width)).astype(np.int8)
    packed = pack_rows(integers, bits)
    assert packed.shape == (rows, packed_width(width, bits))
    assert np.array_equal(unpack_rows(packed, bits, width), integers)


@pytest.mark.parametrize(("bits", "unpack"), [(2, _unpack_int2), (4, _unpack_int4)])
def test_order_and_shift_are_transformers(bits: int, unpack) -> None:
    packed = np.random.default_rng(0).integers(0, 256, (5, 6)).astype(np.uint8)
    width = 6 * 8 // bits - 1
    assert np.array_equal(unpack_rows(packed, bits, width), unpack(torch.from_numpy(packed), width).numpy())


def test_eight_bits_stay_as_they_are() -> None:
    integers = np.array([[-128, 127, 0]], np.int8)
    assert np.array_equal(pack_rows(integers, 8), integers)
    assert np.array_equal(unpack_rows(integers, 8, 3), integers)
