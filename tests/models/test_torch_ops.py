"""What the torch backend adds to torch: shapes of inputs, names for the observer, tables, indices."""

import numpy as np
import pytest
import torch

from hyco_export.core.network.weights import IntegerMatrix, IntegerTable, MatrixShape, PackedMatrices, Weights
from hyco_export.models.torch_ops import PRODUCT_ROWS, TorchOps, TorchWeights

WEIGHTS = Weights(
    {
        "int": IntegerMatrix(np.array([[1, -2], [3, 4]], np.int8), np.array([0.5, 2.0], np.float32), 4),
        "float": np.eye(2, dtype=np.float32),
    },
    {"norm": np.array([2.0, 0.5], np.float32)},
    {"table": IntegerTable(np.array([[128, 130], [0, 255]], np.uint8), np.array([0.5, 0.25], np.float32))},
)


def ops(**feeds: torch.Tensor) -> TorchOps:
    return TorchOps(TorchWeights(WEIGHTS), feeds)


def test_integer_and_float_matrices() -> None:
    x = torch.tensor([[1.0, 1.0]])
    assert ops().linear("y", x, "int").tolist() == [[-0.5, 14.0]]
    assert ops().linear("y", x, "float").tolist() == [[1.0, 1.0]]


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("width", [40, 37])  # 37: the last byte is partly used
def test_packed_matrices_multiply_as_dequantised_ones(bits: int, width: int) -> None:
    generator = np.random.default_rng(bits)
    rows = PRODUCT_ROWS + 3
    integers = generator.integers(-(2 ** (bits - 1)), 2 ** (bits - 1), (rows, width)).astype(np.int8)
    matrix = IntegerMatrix(integers, generator.random(rows).astype(np.float32), bits)
    stored = PackedMatrices({"w": MatrixShape(rows, width, bits)}, lambda name: matrix.packed())
    x = torch.from_numpy(generator.standard_normal((4, width)).astype(np.float32))
    held, packed = (TorchWeights(Weights(stored, {}, {}), values) for values in (rows * width, rows * width - 1))
    assert set(held.matrices) == {"w"}
    assert not packed.matrices
    assert torch.allclose(packed.product(x, "w"), held.product(x, "w"), rtol=1e-4, atol=1e-4)


def test_rms_norm_multiplies_by_the_weight() -> None:
    x = torch.tensor([[3.0, 4.0]])
    unit = x / torch.tensor(12.5).sqrt()
    assert torch.allclose(ops().rms_norm("y", x, None, 0.0), unit)
    assert torch.allclose(ops().rms_norm("y", x, "norm", 0.0), unit * torch.tensor([2.0, 0.5]))


def test_lookup_scales_each_row_by_its_own_scale() -> None:
    assert ops().lookup("y", "table", torch.tensor([0], dtype=torch.int32)).tolist() == [[0.0, 1.0]]
    assert ops().lookup("y", "table", torch.tensor([1], dtype=torch.int32)).tolist() == [[-32.0, 31.75]]


def test_argmax_then_the_next() -> None:
    x = torch.tensor([[1.0, 5.0, 5.0, 2.0]])
    first = ops().argmax("a", x)
    assert (first.dtype, first.tolist()) == (torch.int32, [1])
    assert ops().argmax("b", ops().exclude("e", x, first)).tolist() == [2]
    assert x[0, 1] == 5.0  # untouched


def test_the_observer_sees_what_needs_a_range() -> None:
    seen: list[str] = []
    backend = TorchOps(TorchWeights(WEIGHTS), {"x": torch.ones(1, 2)}, lambda name, values: seen.append(name))
    x = backend.input("x", (1, 2))
    y = backend.softmax("soft", backend.reshape("flat", backend.linear("lin", x, "int"), (2,)))
    backend.convert("conv", backend.tanh("tanh", y), like="x")
    assert seen == ["x", "lin", "conv"]


def test_an_input_of_another_shape_is_named() -> None:
    with pytest.raises(ValueError, match=r"input x has shape \(1, 3\), the network takes \(1, 2\)"):
        ops(x=torch.ones(1, 3)).input("x", (1, 2))
