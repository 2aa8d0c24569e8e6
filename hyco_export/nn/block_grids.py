"""Low-power block quantisation (LPBQ) of linear weights: how block scales are chosen, and weights written on them.

Every block of inputs has a scale of its own, an integer multiple of a float scale per output channel: the one layout
in blocks that HTP computes in integers (QNN: `BLOCKWISE_EXPANSION`; aimet-torch: `GroupedBlockQuantizeDequantize`). The
largest multiplier of a channel is always LARGEST_MULTIPLIER. Pure; knows no model.

Legend: N output channels, K inputs, B inputs of a block, J = K / B blocks.
"""

import numpy as np
import torch

from hyco_export.core.network.weights import LARGEST_MULTIPLIER, IntegerMatrix
from hyco_export.nn.weight_grids import SMALLEST_SCALE, nearest_scales, quantise, searched_scales

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
