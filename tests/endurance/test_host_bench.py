"""The two readings that the bench times give the same columns, and log-probabilities within the stated bound."""

import numpy as np

from hyco_export.core.numerics import LOG_SOFTMAX_BOUND
from tests.endurance import host_bench


def test_device_and_plain_reading_agree_at_paper_size() -> None:
    logits = host_bench.random_logits(4, host_bench.COLUMNS, seed=3)
    plain, device = host_bench.plain(logits), host_bench.device(logits)
    assert np.array_equal(plain.best, device.best)
    span = host_bench.ENCODING.scale * float(np.ptp(logits.astype(np.int64)))
    assert np.abs(plain.log_probs - device.log_probs).max() <= LOG_SOFTMAX_BOUND * (1 + span)


def test_ties_at_the_last_place_go_to_the_smaller_columns() -> None:
    logits = host_bench.random_logits(2, 5_000, seed=4) // 1_000  # some 40 levels
    assert len(np.unique(logits)) < 60
    assert np.array_equal(host_bench.plain(logits).best, host_bench.device(logits).best)
