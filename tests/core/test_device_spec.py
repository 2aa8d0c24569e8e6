"""Real values and integers on either side of a graph."""

import numpy as np

from hyco_export.core.device_spec import TensorSpec, to_integers, to_real
from hyco_export.core.encodings import encoding_from_range

SPECS = (
    TensorSpec("x", (2,), "uint16", encoding_from_range(-1.0, 1.0, "uint16")),
    TensorSpec("ids", (2,), "int32"),
)
REAL = {"x": np.array([-0.5, 0.25], np.float32), "ids": np.array([3, 4]), "more": np.zeros(1)}


def test_there_and_back() -> None:
    integers = to_integers(SPECS, REAL)
    assert set(integers) == {"x", "ids"}
    assert [integers[spec.name].dtype.name for spec in SPECS] == ["uint16", "int32"]
    real = to_real(SPECS, integers)
    assert np.allclose(real["x"], REAL["x"], atol=2e-5)
    assert real["ids"].tolist() == [3, 4]
    assert all(np.array_equal(to_integers(SPECS, real)[name], integers[name]) for name in integers)
