"""The head's linear layers: their names and weights, the low-bit grid of each, and their fake quantisers.

A grid has one scale per output channel (HyCo, Table 4) or per block of inputs (`weight_rounding`). The fake quantisers
are aimet-torch's `QuantizeDequantize` and its form for blocks: forward rounds and clips, backward is a straight-through
estimator that passes gradients inside the range and stops them outside.

Legend: N output channels, K inputs of a linear layer, J blocks of inputs.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
import torch
from aimet_torch.common import py_libpymo
from aimet_torch.quantization.affine import GroupedBlockQuantizeDequantize, QuantizeDequantize
from torch import nn
from torch.nn.utils import parametrize

from hyco_export.core.encodings import symmetric_limits
from hyco_export.core.network.head import EMBEDDING_HALF, PRE_PROJECTION, STATE_HALF
from hyco_export.core.network.weights import MULTIPLIER_BITS, IntegerMatrix
from hyco_export.core.recipe import Qat
from hyco_export.errors import RecipeError
from hyco_export.models.families.gemma4_assistant import CENTROIDS, HeadModel
from hyco_export.models.head.stored import stored_name
from hyco_export.models.verifier import empty_model, load_config
from hyco_export.models.weight_rounding import (
    LPBQ_BLOCK,
    block_matrix,
    integer_matrix,
    nearest_blocks,
    nearest_scales,
    searched_blocks,
    searched_scales,
)

# ---- linear layers by name


def linear_layers(head: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    """Every linear layer by its name in the module: projections, attention, MLPs, output layer; not centroids, which a
    dense output layer does without."""
    for name, module in head.named_modules():
        if isinstance(module, nn.Linear) and not name.startswith(CENTROIDS):
            yield name, module


def linear_weights(head: nn.Module) -> dict[str, torch.Tensor]:
    """Weight [N, K] of every linear layer by its name in the module, without a gradient."""
    return {name: layer.weight.detach() for name, layer in linear_layers(head)}


def untie_output_layer(head: HeadModel) -> None:
    """Give the output layer weights of its own; the tied table is never looked up by a head."""
    head.lm_head.weight = nn.Parameter(head.lm_head.weight.detach().clone(), requires_grad=False)


def load_matrices(head: nn.Module, matrices: Mapping[str, IntegerMatrix]) -> None:
    """Put the real values of stored matrices into the linear layers of a float head (output layer untied)."""
    for name, layer in linear_layers(head):
        load_weight(layer, torch.from_numpy(matrices[name].real()))


def load_weight(layer: nn.Linear, real: torch.Tensor) -> None:
    """Give a layer of a float head a new weight [N, K]; the tensor that it had is not changed."""
    layer.weight = nn.Parameter(real.to(layer.weight.dtype).to(layer.weight.device), requires_grad=False)


# aimet-torch keeps the ImportError of an optional part; its traceback would keep every frame that led to this import,
# with the models in them, until the process ends
py_libpymo.IMPORT_ERROR.__traceback__ = None


def attach(head: nn.Module, matrices: Mapping[str, IntegerMatrix]) -> None:
    """Fake-quantise every linear layer on the grid of its matrix; its weights become trainable, the grids stay fixed.

    `free_grids` makes the grids trainable, too.
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
    """Make scales trainable, too: each gets the gradient of its channel's rounding error (LSQ)."""
    for _, layer in linear_layers(head):
        parametrisations: Any = layer.parametrizations
        parametrisations.weight[0].requires_grad_(True)


def trained_matrices(head: nn.Module) -> dict[str, IntegerMatrix]:
    """The trained integers and scales by layer: exactly the values that the fake-quantised head computes with."""
    matrices = {}
    for name, layer in list(linear_layers(head)):
        parametrisations: Any = layer.parametrizations  # the quantiser [0], and `original`, the float weight behind it
        parametrised = parametrisations.weight
        weight, quantiser = parametrised.original.detach(), parametrised[0]
        scales = quantiser.get_scale().detach()  # [N, 1], with blocks [N, J]
        if isinstance(quantiser, GroupedBlockQuantizeDequantize):
            matrices[name] = block_matrix(weight, scales, quantiser.bitwidth)
        else:
            matrices[name] = integer_matrix(weight, scales[:, 0], quantiser.bitwidth)
    return matrices


def detach(head: nn.Module) -> None:
    """Remove the fake quantisers; the float weights behind them stay."""
    for _, layer in list(linear_layers(head)):
        parametrize.remove_parametrizations(layer, "weight", leave_parametrized=False)
        layer.weight.requires_grad_(False)


# ---- the first matrix in two: one for the embedding, one for the state


class SplitProjection(nn.Module):
    """embedding(e) + state(h) of [e, h] [..., 2 H]: [..., M]; the layers are called as in the static network."""

    def __init__(self, whole: nn.Linear) -> None:
        super().__init__()
        width = whole.in_features // 2
        self.embedding = _linear(whole.weight[:, :width])
        self.state = _linear(whole.weight[:, width:])

    def forward(self, joined: torch.Tensor) -> torch.Tensor:
        embedding, state = joined.chunk(2, dim=-1)
        return self.embedding(embedding) + self.state(state)


def split_projection(head: HeadModel) -> None:
    """Replace the first layer by two; the same function up to the rounding of one sum."""
    head.pre_projection = SplitProjection(head.pre_projection)  # type: ignore[assignment]  # declared as nn.Linear


def split_matrices(matrices: Mapping[str, IntegerMatrix]) -> dict[str, IntegerMatrix]:
    """Integers of a head with the whole matrix for one with the two: halves of the columns, the same scales."""
    others = dict(matrices)
    whole = others.pop(PRE_PROJECTION)
    width = whole.integers.shape[1] // 2
    return {**others, EMBEDDING_HALF: whole.columns(0, width), STATE_HALF: whole.columns(width, 2 * width)}


def _linear(weight: torch.Tensor) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    layer.weight = nn.Parameter(weight.detach().clone(), requires_grad=False)
    return layer


# ---- grids: the recipe's width and blocks, with overrides by name


@dataclass(frozen=True)
class LayerGrid:
    """Width of the integers; `block` inputs share a scale, None = one scale per output channel."""

    bits: int
    block: int | None = None


def linear_widths(folder: Path, split: bool) -> dict[str, int]:
    """Inputs K of every linear layer of a head's checkpoint, by module name; reads its config alone.

    Args:
        split: the first matrix is in two (`split_projection`).
    """
    head = empty_model(HeadModel, load_config(folder))
    with torch.device("meta"):
        if split:
            split_projection(head)
    return {name: layer.in_features for name, layer in linear_layers(head)}


GRID_BLOCKS: Mapping[str, int | None] = {"per-channel": None, "lpbq": LPBQ_BLOCK}  # of the recipe's `$.qat.grid`


def layer_grids(widths: Mapping[str, int], qat: Qat) -> dict[str, LayerGrid]:
    """The grid of each layer, inputs K by module name in `widths`.

    Blocks exist in the recipe's `weight_bits` only: a layer of another width has one scale per output channel.

    Raises:
        RecipeError: a glob matches no layer, or a layer cannot be cut into blocks.
    """
    _require_matches(widths, qat.overrides)
    block = GRID_BLOCKS[qat.grid]
    grids = {}
    for name, width in widths.items():
        matching = [wanted for pattern, wanted in qat.overrides.items() if fnmatchcase(stored_name(name), pattern)]
        layer_bits = matching[-1] if matching else qat.weight_bits
        layer_block = block if layer_bits == qat.weight_bits else None
        if layer_block and width % layer_block:
            raise RecipeError(
                f"$.qat.grid: {stored_name(name)} has {width} inputs, not a multiple of {qat.grid}'s {layer_block}",
                "give it 8 bits with $.qat.overrides, or $.qat.grid: per-channel",
            )
        grids[name] = LayerGrid(layer_bits, layer_block)
    return grids


def _require_matches(names: Iterable[str], patterns: Iterable[str]) -> None:
    stored = sorted(map(stored_name, names))
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in stored):
            raise RecipeError(f"$.qat.overrides: no linear layer is called {pattern}", f"there are {', '.join(stored)}")


def nearest_on(weights: Mapping[str, torch.Tensor], grids: Mapping[str, LayerGrid]) -> dict[str, IntegerMatrix]:
    """Weights [N, K] rounded to nearest on their layers' grids."""

    def rounded(weight: torch.Tensor, grid: LayerGrid) -> IntegerMatrix:
        if grid.block is not None:
            return nearest_blocks(weight, grid.bits, grid.block)
        return integer_matrix(weight, nearest_scales(weight, grid.bits), grid.bits)

    return {name: rounded(weight, grids[name]) for name, weight in weights.items()}


def searched_on(
    weights: Mapping[str, torch.Tensor], grids: Mapping[str, LayerGrid], ratios: np.ndarray
) -> dict[str, IntegerMatrix]:
    """Weights [N, K] on their layers' grids after a search for the clip ratio of each scale."""

    def searched(weight: torch.Tensor, grid: LayerGrid) -> IntegerMatrix:
        if grid.block is not None:
            return searched_blocks(weight, grid.bits, ratios, grid.block)
        return integer_matrix(weight, searched_scales(weight, grid.bits, ratios), grid.bits)

    return {name: searched(weight, grids[name]) for name, weight in weights.items()}
