"""What the torch back end adds to torch: shapes of inputs, names for the observer, tables, indices; and the observer,
whose ranges are exact percentiles over all passes.
"""

import numpy as np
import pytest
import torch

from hyco_export.core.network.weights import IntegerMatrix, IntegerTable, MatrixShape, PackedMatrices, Weights
from hyco_export.models.torch_ops import PRODUCT_ROWS, RangeObserver, TorchOps, TorchWeights

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


def observed(values: np.ndarray, percentile: float, symmetric: dict[str, float] | None = None) -> tuple[float, float]:
    """Range of `x` over passes [n, m]."""
    observer = RangeObserver(percentile, len(values), symmetric)
    for part in values:
        observer("x", torch.from_numpy(part))
    return observer.ranges()["x"]


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("percentile", [90.0, 99.0, 99.9])
def test_percentile_over_all_passes(order: int, percentile: float) -> None:
    values = np.sort(np.random.default_rng(0).normal(size=4000)).astype(np.float32)[::order].reshape(8, 500)
    low, high = observed(values.copy(), percentile)
    assert low == np.percentile(values, 100 - percentile, method="higher")
    assert high == np.percentile(values, percentile, method="lower")
    outside = np.mean((values < low) | (values > high))
    assert outside <= 2 * (1 - percentile / 100) + 1e-9


def test_hundred_is_minimum_and_maximum() -> None:
    values = np.random.default_rng(0).normal(size=(3, 7)).astype(np.float32)
    assert observed(values, 100.0) == (values.min(), values.max())


def test_magnitudes_where_asked() -> None:
    values = np.concatenate([np.full((1, 99), 1.0), np.full((1, 1), -5.0)], axis=1).astype(np.float32)
    assert observed(values, 100.0, {"x": 100.0}) == (-5.0, 5.0)
    assert observed(values, 100.0, {"x": 98.0}) == (-1.0, 1.0)


def test_few_extremes_are_kept() -> None:
    observer = RangeObserver(99.0, passes=10)
    for part in np.random.default_rng(0).normal(size=(10, 1000)).astype(np.float32):
        observer("x", torch.from_numpy(part))
    assert len(observer._highest["x"]) == 101


def test_another_observer_goes_on_from_the_state() -> None:
    values = torch.randn(4, 50, generator=torch.Generator().manual_seed(0))
    whole, first, second = (RangeObserver(99.0, 4, {"k": 90.0}) for _ in range(3))
    for number, row in enumerate(values):
        for observer in (whole, first if number < 2 else second):
            if number == 2 and observer is second:
                second.restore(first.state())
            observer("x", row)
            observer("k", row)
    assert second.ranges() == whole.ranges()
    assert first.ranges() != whole.ranges()
