"""Which integer grid each linear layer of a head gets: width and layout of the recipe, with overrides by name.

Names are those of the static network (`layers.0.mlp.up_proj`). Knows names and widths of layers; `nn.weight_grids` and
`nn.block_grids` know how weights are put on a grid.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

import numpy as np
import torch
from transformers import Gemma4AssistantForCausalLM

from hyco_export.core.network.weights import IntegerMatrix
from hyco_export.errors import RecipeError
from hyco_export.nn.block_grids import LPBQ_BLOCK, nearest_blocks, searched_blocks
from hyco_export.nn.head.linears import linear_layers
from hyco_export.nn.head.split_projection import split_projection
from hyco_export.nn.head.stored import stored_name
from hyco_export.nn.verifier import empty_model, load_config
from hyco_export.nn.weight_grids import integer_matrix, nearest_scales, searched_scales


@dataclass(frozen=True)
class LayerGrid:
    """Width of the integers; `block` inputs share a scale, None = one scale per output channel."""

    bits: int
    block: int | None = None


def linear_widths(folder: Path, split: bool) -> dict[str, int]:
    """Inputs K of every linear layer of a head's checkpoint, by module name; reads its configuration only.

    `split`: the first matrix in two (`nn.head.split_projection`).
    """
    head = empty_model(Gemma4AssistantForCausalLM, load_config(folder))
    with torch.device("meta"):
        if split:
            split_projection(head)
    return {name: layer.in_features for name, layer in linear_layers(head)}


def layer_grids(
    widths: Mapping[str, int], bits: int, blocks: bool, overrides: Mapping[str, int]
) -> dict[str, LayerGrid]:
    """The grid of each layer. Blocks exist in `bits` only: a layer of another width has one scale per output channel.

    Args:
        widths: inputs K by module name.
        bits: of all layers that no override names.
        blocks: low-power blocks instead of one scale per output channel.
        overrides: glob over stored names -> bits; a later one wins.

    Raises:
        RecipeError: a glob matches no layer, or a layer cannot be cut into blocks.
    """
    _require_matches(widths, overrides)
    grids = {}
    for name, width in widths.items():
        matching = [wanted for pattern, wanted in overrides.items() if fnmatchcase(stored_name(name), pattern)]
        layer_bits = matching[-1] if matching else bits
        in_blocks = blocks and layer_bits == bits
        if in_blocks and width % LPBQ_BLOCK:
            raise RecipeError(
                f"$.qat.grid: {stored_name(name)} has {width} inputs, not a multiple of lpbq's {LPBQ_BLOCK}",
                "give it 8 bits with $.qat.overrides, or $.qat.grid: per-channel",
            )
        grids[name] = LayerGrid(layer_bits, LPBQ_BLOCK if in_blocks else None)
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
