"""Low-bit integers of linear weights, and the choice of their scales: per output channel or per block of inputs.

The grids are symmetric around 0 (HyCo, Table 4).

Legend: N output channels, K inputs of a linear layer.
"""

import numpy as np
import torch

from hyco_export.core.encodings import symmetric_limits
from hyco_export.core.network.weights import LARGEST_MULTIPLIER, IntegerMatrix

SMALLEST_SCALE = torch.finfo(torch.float32).tiny  # of a channel whose weights are all zero
CHANNELS_AT_ONCE = 4096  # 25 MB of float32 at 1,536 inputs: temporaries of the search stay small


def nearest_scales(weight: torch.Tensor, bits: int) -> torch.Tensor:
    """Scales [N] of plain rounding to nearest: the largest magnitude of a channel lies on the highest integer."""
    return clipped_scales(weight, bits, 1.0)


def clipped_scales(weight: torch.Tensor, bits: int, ratio: float) -> torch.Tensor:
    """Scales [N] when weight [N, K] is clipped at `ratio` times the largest magnitude of each channel."""
    _, highest = symmetric_limits(bits)
    return (weight.abs().amax(dim=1) * (ratio / highest)).clamp_min(SMALLEST_SCALE)


def searched_scales(weight: torch.Tensor, bits: int, ratios: np.ndarray) -> torch.Tensor:
    """Scales [N] with the least squared error of each channel of weight [N, K] among the clip ratios."""
    best = nearest_scales(weight, bits)
    least = torch.full_like(best, torch.inf)
    for ratio in ratios:
        scales = clipped_scales(weight, bits, float(ratio))
        error = (quantise(weight, scales, bits) * scales[:, None] - weight).square().sum(dim=1)
        better = error < least
        best, least = torch.where(better, scales, best), torch.where(better, error, least)
    return best


def quantise(weight: torch.Tensor, scales: torch.Tensor, bits: int) -> torch.Tensor:
    """Integers [N, K] (as floats) of weight [N, K] on the grid of scales [N]."""
    lowest, highest = symmetric_limits(bits)
    return torch.round(weight / scales[:, None]).clamp(lowest, highest)


def integer_matrix(weight: torch.Tensor, scales: torch.Tensor, bits: int) -> IntegerMatrix:
    """Weight [N, K] as it is stored on the grid of scales [N]."""
    integers = quantise(weight, scales, bits).to(torch.int8)
    return IntegerMatrix(integers.cpu().numpy(), scales.float().cpu().numpy(), bits)


def searched_matrix(weight: torch.Tensor, bits: int, ratios: np.ndarray) -> IntegerMatrix:
    """Weight [N, K] on the grids of the clip search, CHANNELS_AT_ONCE at a time."""
    parts = [
        integer_matrix(channels, searched_scales(channels, bits, ratios), bits)
        for channels in weight.float().split(CHANNELS_AT_ONCE)
    ]
    integers = np.concatenate([part.integers for part in parts])
    return IntegerMatrix(integers, np.concatenate([part.scales for part in parts]), bits)


# ---- low-power block quantisation (LPBQ): scales by block of inputs

LPBQ_BLOCK = 64  # inputs; the vendor's choice for language models on HTP


def nearest_blocks(weight: torch.Tensor, bits: int, block: int = LPBQ_BLOCK) -> IntegerMatrix:
    """Weight [N, K] rounded to nearest: the largest magnitude of a block lies near the highest integer."""
    return block_matrix(weight, nearest_scales(_blocks(weight, block), bits).reshape(len(weight), -1), bits)


def searched_blocks(weight: torch.Tensor, bits: int, ratios: np.ndarray, block: int = LPBQ_BLOCK) -> IntegerMatrix:
    """Weight [N, K], each block clipped at the ratio with the least squared error before its scale is rounded."""
    return block_matrix(weight, searched_scales(_blocks(weight, block), bits, ratios).reshape(len(weight), -1), bits)


def block_matrix(weight: torch.Tensor, scales: torch.Tensor, bits: int) -> IntegerMatrix:
    """Weight [N, K] as it is stored on block scales [N, J], which become multiples of one scale per channel."""
    channel = (scales.amax(dim=1) / LARGEST_MULTIPLIER).clamp_min(SMALLEST_SCALE)  # [N]
    multipliers = torch.round(scales / channel[:, None]).clamp(1, LARGEST_MULTIPLIER)  # [N, J]
    exact = (multipliers * channel[:, None]).reshape(-1)
    integers = quantise(_blocks(weight, weight.shape[1] // scales.shape[1]), exact, bits).reshape(weight.shape)
    return IntegerMatrix(
        integers.to(torch.int8).cpu().numpy(),
        channel.float().cpu().numpy(),
        bits,
        multipliers.to(torch.uint8).cpu().numpy(),
    )


def _blocks(weight: torch.Tensor, block: int) -> torch.Tensor:
    """[N, K] -> [N * J, B]: every block as a channel of its own."""
    return weight.reshape(-1, block)
