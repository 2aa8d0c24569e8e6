"""Network and weights come back from the file as they went in."""

from pathlib import Path

import numpy as np
import pytest

from hyco_export.core.network.weight_files import linears_of_width, read_slm, write_slm
from hyco_export.core.network.weights import IntegerMatrix, MatrixShape, PackedMatrices, Weights
from hyco_export.errors import ArtifactError
from tests.core.network.test_host import network


def weights() -> Weights:
    generator = np.random.default_rng(0)
    matrices = {
        f"w{bits}": IntegerMatrix(
            generator.integers(-(2 ** (bits - 1)), 2 ** (bits - 1), (3, 5)).astype(np.int8),
            generator.random(3).astype(np.float32),
            bits,
        )
        for bits in (2, 4, 8)
    }
    shapes = {name: MatrixShape(3, 5, matrix.bits) for name, matrix in matrices.items()}
    stored = PackedMatrices(shapes, lambda name: matrices[name].packed())
    return Weights(stored, {"norm": generator.random(4).astype(np.float32)}, {})


def test_round_trip(tmp_path: Path) -> None:
    write_slm(tmp_path / "w.safetensors", network(), weights())
    found_network, found = read_slm(tmp_path / "w.safetensors")
    assert found_network == network()
    assert set(found.matrices) == {"w2", "w4", "w8"}
    for name, matrix in weights().integer_matrices().items():
        again = found.integer_matrices()[name]
        assert np.array_equal(again.integers, matrix.integers)
        assert np.array_equal(again.scales, matrix.scales)
        assert again.bits == matrix.bits
    assert set(found.vectors) == {"norm"}


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    write_slm(path, network(), weights())
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ArtifactError, match=r"SLM weights .*w\.safetensors cannot be read"):
        read_slm(path)
    with pytest.raises(ArtifactError, match=r"SLM weights .*w\.safetensors cannot be read"):
        linears_of_width(path, 2)


def test_linear_layers_are_listed_by_width(tmp_path: Path) -> None:
    write_slm(tmp_path / "w.safetensors", network(), weights())
    assert [linears_of_width(tmp_path / "w.safetensors", bits) for bits in (2, 4, 8)] == [("w2",), ("w4",), ("w8",)]
