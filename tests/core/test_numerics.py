"""Log-softmax and SQNR against their definitions."""

import numpy as np
import pytest

from hyco_export.core.numerics import (
    EXACT_DB,
    LOG_SOFTMAX_BOUND,
    along,
    decibels,
    log_softmax,
    log_softmax_rows,
    logit_kl,
    max_abs,
    sqnr_db,
    top1_agreement,
)


def test_log_softmax_is_the_logarithm_of_shares_that_sum_to_one() -> None:
    logits = np.random.default_rng(1).normal(0, 30, (3, 5, 700)).astype(np.float32)
    values = log_softmax(logits)
    assert values.dtype == np.float64 and values.shape == logits.shape
    np.testing.assert_allclose(np.exp(values).sum(axis=-1), 1.0, rtol=1e-12)
    np.testing.assert_allclose(values - values[..., :1], logits.astype(np.float64) - logits[..., :1], atol=1e-9)


@pytest.mark.parametrize("scale", [1e-6, 1e-3, 0.05])
def test_log_softmax_of_rows_is_the_proofs_one_within_its_bound(scale: float) -> None:
    generator = np.random.default_rng(2)
    narrow = generator.integers(60_000, 60_100, (2, 5_000))  # far from 0: products alone would lose the differences
    levels = np.concatenate([narrow, generator.integers(0, 65_536, (4, 5_000))]).astype(np.float32)
    products = levels * np.float64(np.float32(scale))
    found = log_softmax_rows(levels.copy(), scale)
    assert found.dtype == np.float32
    off = np.abs(found - log_softmax(products)).max(axis=1)
    assert (off <= LOG_SOFTMAX_BOUND * (1 + np.ptp(products, axis=1))).all()


def test_log_softmax_survives_logits_whose_exponential_overflows() -> None:
    assert log_softmax(np.array([[1e4, 0.0]], np.float32)).tolist() == [[0.0, -1e4]]


def test_sqnr_counts_a_tenth_of_the_signal_as_twenty_decibels() -> None:
    signal = np.random.default_rng(2).normal(size=1000)
    assert sqnr_db(signal, 1.1 * signal) == pytest.approx(20.0)
    assert sqnr_db(signal, signal) == EXACT_DB and sqnr_db(0 * signal, signal) == -EXACT_DB


def test_decibels_end_at_the_limit() -> None:
    assert decibels(100.0, 1.0) == pytest.approx(20.0)
    assert decibels(1.0, 1e-30) == EXACT_DB
    assert decibels(0.0, 0.0) == EXACT_DB and decibels(0.0, 1.0) == -EXACT_DB


def test_max_abs_does_not_wrap_in_unsigned_integers() -> None:
    assert max_abs(np.array([0], np.uint16), np.array([65535], np.uint16)) == 65535.0


def test_top1_agreement_counts_rows() -> None:
    reference = np.array([[1.0, 2.0], [3.0, 1.0], [0.0, 5.0], [9.0, 1.0]])
    candidate = np.array([[1.0, 2.0], [1.0, 3.0], [0.0, 5.0], [9.0, 1.0]])
    assert top1_agreement(reference, candidate) == 0.75


def test_kl_against_the_closed_form_and_shift_invariance() -> None:
    p, q = np.array([0.5, 0.25, 0.25]), np.array([0.25, 0.5, 0.25])
    wanted = float(np.sum(p * np.log(p / q)))
    assert logit_kl(np.log(p)[None], np.log(q)[None] + 100.0) == pytest.approx(wanted)
    assert logit_kl(np.log(p)[None], np.log(p)[None]) == pytest.approx(0.0, abs=1e-12)


def test_a_curve_is_straight_between_its_points_and_goes_on_along_the_last_two() -> None:
    points = ((1, 2.0), (5, 6.0), (9, 8.0))
    assert [along(points, at) for at in (0, 1, 3, 5, 7, 9, 13)] == [2.0, 2.0, 4.0, 6.0, 7.0, 8.0, 10.0]
    assert along(((4, 3.0),), 9) == 3.0
