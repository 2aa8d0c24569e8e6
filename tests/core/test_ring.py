"""Ring arithmetic at its edges."""

import numpy as np
import pytest

from hyco_export.core.ring import EMPTY, slot_positions, slots, visible


@pytest.mark.parametrize("length", [0, 1, 7, 8, 9, 23])
def test_slot_positions_equal_writing_one_by_one(length: int) -> None:
    written = np.full(8, EMPTY)
    for position in range(length):
        written[slots(position, 1, 8)] = position
    np.testing.assert_array_equal(slot_positions(length, 8), written)


def test_slots_wrap() -> None:
    np.testing.assert_array_equal(slots(6, 4, 8), [6, 7, 0, 1])


def test_visibility_by_span() -> None:
    keys = np.array([EMPTY, 4, 5, 6, 7])
    query = np.array([6])
    np.testing.assert_array_equal(visible(query, keys, None)[0], [False, True, True, True, False])
    np.testing.assert_array_equal(visible(query, keys, 2)[0], [False, False, True, True, False])
