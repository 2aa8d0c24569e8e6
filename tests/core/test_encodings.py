"""Integer grids: zero is exact, ends clip, halves round to even."""

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hyco_export.core.encodings import Encoding, encoding_from_range, symmetric_encoding, symmetric_limits


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
