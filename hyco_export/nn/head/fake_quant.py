"""Low-bit weights of a head's linear layers: how grids are attached for training, and read out as integers.

Grids are those of `nn.weight_grids` (Table 4 of the paper) and `nn.block_grids`. Knows weights only; `nn.head.qat`
trains them. The fake quantisers are aimet-torch's `QuantizeDequantize` and its form for blocks: forward rounds and
clips, backward is a straight-through estimator that passes gradients inside the grid and stops them outside.

Legend: N output channels, K inputs of a linear layer, J blocks of inputs.
"""

from collections.abc import Mapping
from typing import Any

import torch
from aimet_torch.common import py_libpymo
from aimet_torch.quantization.affine import GroupedBlockQuantizeDequantize, QuantizeDequantize
from torch import nn
from torch.nn.utils import parametrize

from hyco_export.core.encodings import symmetric_limits
from hyco_export.core.network.weights import MULTIPLIER_BITS, IntegerMatrix
from hyco_export.nn.block_grids import block_matrix
from hyco_export.nn.head.linears import linear_layers
from hyco_export.nn.weight_grids import integer_matrix

# aimet-torch keeps the error by which it notices that a part of it is not installed, and that error's traceback keeps
# every frame that led to this import with all they hold, models too, until the process ends
py_libpymo.IMPORT_ERROR.__traceback__ = None


def attach(head: nn.Module, matrices: Mapping[str, IntegerMatrix]) -> None:
    """Fake-quantise every linear layer on the grid of its matrix from now on; its weights become trainable.

    The grids stay fixed: they are those of the clip search, and only the weights move between their points. Unless
    `free_grids` is called.
    """
    for name, layer in linear_layers(head):
        quantiser = _quantiser(matrices[name]).to(layer.weight.device)
        quantiser.requires_grad_(False)
        layer.weight.requires_grad_(True)
        parametrize.register_parametrization(layer, "weight", quantiser)


def _quantiser(matrix: IntegerMatrix) -> QuantizeDequantize:
    """aimet-torch's quantiser on a matrix's grid: its range is [lowest, highest] of each scale [N, 1] or [N, J]."""
    lowest, highest = symmetric_limits(matrix.bits)
    scales = torch.from_numpy(matrix.scales)[:, None]
    if matrix.multipliers is None:
        quantiser = QuantizeDequantize(tuple(scales.shape), matrix.bits, symmetric=True)
    else:
        scales = scales * torch.from_numpy(matrix.multipliers)
        quantiser = GroupedBlockQuantizeDequantize(
            tuple(scales.shape),
            matrix.bits,
            symmetric=True,
            decompressed_bw=matrix.bits + MULTIPLIER_BITS,
            block_size=(1, matrix.block),
            block_grouping=(1, -1),  # all blocks of a channel share its float scale
        )
    quantiser.set_range(scales * lowest, scales * highest)
    return quantiser


def free_grids(head: nn.Module) -> None:
    """Let training move the grids too: each channel's scale gets the gradient of its rounding error (LSQ)."""
    for _, layer in linear_layers(head):
        parametrisations: Any = layer.parametrizations
        parametrisations.weight[0].requires_grad_(True)


def trained_matrices(head: nn.Module) -> dict[str, IntegerMatrix]:
    """What `attach` and training left, by layer: exactly the values that the fake-quantised head computes with."""
    matrices = {}
    for name, layer in list(linear_layers(head)):
        parametrisations: Any = layer.parametrizations  # by attribute: the quantiser, and `original`, the float master
        parametrised = parametrisations.weight
        weight, quantiser = parametrised.original.detach(), parametrised[0]
        scales = quantiser.get_scale().detach()  # [N, 1], with blocks [N, J]
        if isinstance(quantiser, GroupedBlockQuantizeDequantize):
            matrices[name] = block_matrix(weight, scales, quantiser.bitwidth)
        else:
            matrices[name] = integer_matrix(weight, scales[:, 0], quantiser.bitwidth)
    return matrices


def detach(head: nn.Module) -> None:
    """Remove the fake quantisers; the float masters stay as plain weights."""
    for _, layer in list(linear_layers(head)):
        parametrize.remove_parametrizations(layer, "weight", leave_parametrized=False)
        layer.weight.requires_grad_(False)
