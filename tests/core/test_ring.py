"""Ring arithmetic at its edges, and rotary tables that rotate exactly as transformers does."""

import numpy as np
import pytest
import torch
from transformers.models.gemma4.modeling_gemma4 import Gemma4TextRotaryEmbedding, apply_rotary_pos_emb

from hyco_export.core.ring import EMPTY, held_positions, rotary_tables, slot_positions, slots, visible
from tests.support.packed_slm import slm_config


@pytest.mark.parametrize("length", [0, 1, 7, 8, 9, 23])
def test_slot_positions_equal_writing_one_by_one(length: int) -> None:
    written = np.full(8, EMPTY)
    for position in range(length):
        written[slots(position, 1, 8)] = position
    np.testing.assert_array_equal(slot_positions(length, 8), written)


def test_slots_that_no_position_reached_are_empty() -> None:
    assert list(held_positions(5, 7, 4)) == [-1, 5, 6, -1]
    assert list(held_positions(5, 10, 4)) == [8, 9, 6, 7]


def test_slots_wrap() -> None:
    np.testing.assert_array_equal(slots(6, 4, 8), [6, 7, 0, 1])


def test_visibility_by_span() -> None:
    keys = np.array([EMPTY, 4, 5, 6, 7])
    query = np.array([6])
    np.testing.assert_array_equal(visible(query, keys, None)[0], [False, True, True, True, False])
    np.testing.assert_array_equal(visible(query, keys, 2)[0], [False, False, True, True, False])


POSITIONS = np.array([0, 1, 7, 130, 99_999])


def test_rotation_equals_transformers_for_both_layer_types() -> None:
    rotary = Gemma4TextRotaryEmbedding(slm_config())
    assert len(rotary.layer_types) == 2
    for layer_type in rotary.layer_types:
        inv_freq = getattr(rotary, f"{layer_type}_inv_freq")
        x = torch.randn(1, len(POSITIONS), 2 * len(inv_freq), generator=torch.Generator().manual_seed(0))
        cos, sin = rotary(x, torch.from_numpy(POSITIONS)[None], layer_type)
        wanted = apply_rotary_pos_emb(x[:, None], cos, sin)[0, 0].numpy()
        own_cos, own_sin = rotary_tables(POSITIONS, inv_freq.tolist())
        values = x[0].numpy()
        swapped = np.concatenate(np.split(values, 2, axis=1)[::-1], axis=1)
        assert np.allclose(values * own_cos + swapped * own_sin, wanted, atol=1e-5)


def test_a_pair_with_frequency_zero_does_not_turn() -> None:
    cos, sin = rotary_tables(np.array([12]), (0.5, 0.0))
    assert cos.shape == (1, 4)
    assert cos[0, [1, 3]].tolist() == [1.0, 1.0]
    assert sin[0, [1, 3]].tolist() == [0.0, 0.0]
    assert sin[0, 0] == -sin[0, 2] != 0.0
