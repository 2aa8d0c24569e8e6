"""Comparison of ids and logits."""

import numpy as np
import pytest

from hyco_export.evaluate.backend_parity import compare_ids, compare_logits


def test_ids_are_compared_position_by_position():
    wanted = [np.array([1, 2, 3]), np.array([4, 5, 6])]
    found = [np.array([1, 2, 3]), np.array([4, 9, 6])]
    result = compare_ids("head", "torch", "onnx-cpu", wanted, found)
    assert (result.positions, result.agreement) == (6, pytest.approx(5 / 6))
    assert result.agreement_by_depth == (1.0, 0.5, 1.0)


def test_logits_are_compared_row_by_row():
    wanted = [np.array([[0.0, 4.0], [3.0, 1.0]]), np.array([[1.0, 2.0]])]
    found = [np.array([[0.0, 4.0], [3.0, 1.0]]), np.array([[2.0, 1.9]])]
    result = compare_logits("slm_tree", "torch", "qnn", wanted, found)
    assert (result.positions, result.agreement) == (3, pytest.approx(2 / 3))
    assert result.range_share == pytest.approx(1.0 / 4.0)
    assert result.kl_nats > 0


def test_equal_logits_are_perfect():
    rows = [np.array([[0.0, 4.0]])]
    result = compare_logits("slm_tree", "torch", "qnn", rows, rows)
    assert (result.agreement, result.kl_nats, result.range_share) == (1.0, 0.0, 0.0)


@pytest.mark.parametrize("compare", [compare_ids, compare_logits])
def test_comparing_nothing_is_refused(compare):
    with pytest.raises(ValueError, match="no feeds to compare head on"):
        compare("head", "torch", "qnn", [], [])
