"""Ranges are exact percentiles over all passes, whatever the order of the values."""

import numpy as np
import pytest
import torch

from hyco_export.models.torch_ops import RangeObserver


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
