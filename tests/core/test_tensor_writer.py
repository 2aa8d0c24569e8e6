"""A file written piece by piece is the library's own, byte for byte."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from hyco_export.core.files import Declared, TensorWriter

GENERATOR = np.random.default_rng(0)
TENSORS = {
    "z.scales": GENERATOR.random(5).astype(np.float32),
    "a.integers": GENERATOR.integers(0, 255, (5, 3)).astype(np.uint8),
    "b": GENERATOR.integers(-9, 9, (4, 7)).astype(np.int8),
    "norm": GENERATOR.random((2, 2)).astype(np.float32),
    "é": np.array(1.5, np.float32),
}
DECLARED = {name: Declared(values.dtype.name, values.shape) for name, values in TENSORS.items()}


def test_bytes_are_those_of_save_file(tmp_path: Path) -> None:
    metadata = {"layout": '{"a": "x/y"}'}
    save_file(TENSORS, tmp_path / "library", metadata=metadata)
    with TensorWriter(tmp_path / "ours", DECLARED, metadata) as writer:
        for name, values in reversed(TENSORS.items()):
            if values.ndim == 2:
                writer.put(name, values[1:], first_row=1)
                writer.put(name, values[:1])
            else:
                writer.put(name, values)
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "library").read_bytes()


def test_a_tensor_left_out_is_named(tmp_path: Path) -> None:
    with (
        pytest.raises(ValueError, match=r"2 tensors were not written whole, first norm"),
        TensorWriter(tmp_path / "ours", DECLARED, {}) as writer,
    ):
        for name in ("z.scales", "é", "a.integers"):
            writer.put(name, TENSORS[name])


def test_another_type_or_width_is_refused(tmp_path: Path) -> None:
    with TensorWriter(tmp_path / "ours", {"b": DECLARED["b"]}, {}) as writer:
        with pytest.raises(ValueError, match=r"b is uint8 \(4, 7\), declared as"):
            writer.put("b", TENSORS["b"].view(np.uint8))
        with pytest.raises(ValueError, match=r"b is int8 \(4, 6\)"):
            writer.put("b", TENSORS["b"][:, 1:])
        writer.put("b", TENSORS["b"])
