"""Block scales are integer multiples of one scale per channel, and pay where the blocks of a channel differ."""

import numpy as np
import torch

from hyco_export.models.weight_rounding import (
    block_matrix,
    integer_matrix,
    nearest_blocks,
    nearest_scales,
    searched_blocks,
    searched_scales,
)

RATIOS = np.linspace(1.0, 0.6, 41)
BLOCK = 16


def weight(spread):
    """[6, 64] whose four blocks of inputs have these standard deviations."""
    values = torch.randn(6, 64, generator=torch.Generator().manual_seed(0))
    return values * torch.tensor(spread).repeat_interleave(BLOCK)


def error(values, matrix):
    return float((torch.from_numpy(matrix.real()) - values).square().sum())


def test_blocks_of_different_size_gain_and_equal_ones_lose_nothing_much():
    uneven, even = weight([1.0, 0.1, 0.5, 0.05]), weight([1.0, 1.0, 1.0, 1.0])
    for values, gain in ((uneven, 2.0), (even, 0.8)):
        plain = integer_matrix(values, searched_scales(values, 4, RATIOS), 4)
        assert error(values, searched_blocks(values, 4, RATIOS, BLOCK)) < error(values, plain) / gain
    assert error(uneven, searched_blocks(uneven, 4, RATIOS, BLOCK)) < error(uneven, nearest_blocks(uneven, 4, BLOCK))


def test_multipliers_reach_their_top_in_every_channel_and_integers_their_range():
    matrix = nearest_blocks(weight([1.0, 0.1, 0.5, 0.001]), 4, BLOCK)
    assert matrix.multipliers.shape == (6, 4)
    assert matrix.multipliers.max(axis=1).tolist() == [16] * 6
    assert matrix.multipliers.min() == 1  # a block too small for any multiple keeps the smallest
    assert -8 <= matrix.integers.min() < matrix.integers.max() <= 7


def test_one_block_is_a_scale_per_channel():
    values = weight([1.0, 0.4, 0.2, 0.9])
    plain = integer_matrix(values, nearest_scales(values, 4), 4)
    np.testing.assert_array_equal(nearest_blocks(values, 4, 64).integers, plain.integers)
    np.testing.assert_allclose(nearest_blocks(values, 4, 64).real(), plain.real(), rtol=1e-6)


def test_a_channel_of_zeros_has_normal_scales():
    matrix = block_matrix(torch.zeros(2, 32), torch.full((2, 2), 1e-38), 4)
    assert (matrix.scales >= np.finfo(np.float32).tiny).all()
    assert not matrix.integers.any()
