"""Packed integers come back, for every width and odd lengths, and are what transformers unpacks."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.integrations.gemma_quant import _unpack_int2, _unpack_int4

from hyco_export.core.encodings import WIDTHS, pack_rows, packed_width, unpack_rows


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
