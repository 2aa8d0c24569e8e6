"""Where the server's sliding window ends, from noise alone."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hyco_export.evaluate.diagnosis.handoff_comparison import first_changed

WINDOW, LENGTH = 64, 110


def noise(level: float, seed: int = 0) -> np.ndarray:
    """Mean squares of 256 rounding errors [P]."""
    return level * np.random.default_rng(seed).chisquare(256, LENGTH) / 256


@given(st.sampled_from([0.0, 1e-6, 1.5e-4]), st.integers(4, WINDOW), st.integers(0, 99))
def test_the_first_changed_position_is_found_in_any_precision(floor, edge, seed):
    found = noise(floor, seed)
    found[edge:] += noise(3e-4 + 2 * floor, seed + 1)[edge:]
    assert first_changed(found, WINDOW) == edge


@given(st.sampled_from([0.0, 1e-6, 1.5e-4, 0.3]), st.integers(0, 99))
def test_even_noise_has_no_edge(level, seed):
    assert first_changed(noise(level, seed), WINDOW) is None


@pytest.mark.parametrize("known", [slice(0, WINDOW + 3), slice(WINDOW - 4, LENGTH)])
def test_without_positions_on_both_sides_nothing_is_said(known):
    found = np.full(LENGTH, np.nan)
    found[known] = noise(1e-3)[known]
    assert first_changed(found, WINDOW) is None


def test_single_integers_that_round_the_other_way_are_no_edge():
    found = np.zeros(LENGTH)
    found[[70, 90]] = 8e-7
    assert first_changed(found, WINDOW) is None
