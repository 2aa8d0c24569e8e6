"""Low-bit weights of a head's linear layers: how grids are attached for training, and read out as integers.

Grids are those of `nn.weight_grids` (Table 4 of the paper). Knows weights only; `nn.head.qat` trains them. The fake
quantiser is aimet-torch's `QuantizeDequantize`: forward rounds and clips, backward is a straight-through estimator that
passes gradients inside the grid and stops them outside.

Legend: N output channels, K inputs of a linear layer.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from aimet_torch.quantization.affine import QuantizeDequantize
from torch import nn
from torch.nn.utils import parametrize
from transformers import Gemma4AssistantForCausalLM

from hyco_export.core.encodings import symmetric_limits
from hyco_export.core.network.weights import IntegerMatrix
from hyco_export.nn.weight_grids import integer_matrix


def linear_layers(head: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    """Every linear layer by its name in the module: projections, attention, MLPs, output layer."""
    for name, module in head.named_modules():
        if isinstance(module, nn.Linear):
            yield name, module


def untie_output_layer(head: Gemma4AssistantForCausalLM) -> None:
    """Give the output layer weights of its own; the tied table is never looked up by a head."""
    head.lm_head.weight = nn.Parameter(head.lm_head.weight.detach().clone(), requires_grad=False)


def attach(head: nn.Module, scales: Mapping[str, torch.Tensor], bits: int) -> None:
    """Fake-quantise the linear layers named in `scales` [N] from now on; their weights become trainable.

    The grids stay fixed: they are those of the clip search, and only the weights move between their points. Unless
    `free_grids` is called.
    """
    lowest, highest = symmetric_limits(bits)
    for name, layer in linear_layers(head):
        grid = scales[name][:, None].float()
        quantiser = QuantizeDequantize((len(grid), 1), bits, symmetric=True)
        quantiser.set_range(grid * lowest, grid * highest)
        quantiser.requires_grad_(False)
        layer.weight.requires_grad_(True)
        parametrize.register_parametrization(layer, "weight", quantiser)


def free_grids(head: nn.Module) -> None:
    """Let training move the grids too: each channel's scale gets the gradient of its rounding error (LSQ)."""
    for _, layer in linear_layers(head):
        parametrisations: Any = layer.parametrizations
        parametrisations.weight[0].requires_grad_(True)


def trained_matrices(head: nn.Module, bits: int) -> dict[str, IntegerMatrix]:
    """What `attach` and training left, by layer: exactly the values that the fake-quantised head computes with."""
    matrices = {}
    for name, layer in list(linear_layers(head)):
        parametrisations: Any = layer.parametrizations  # by attribute: the quantiser, and `original`, the float master
        parametrised = parametrisations.weight
        scales = parametrised[0].get_scale().detach()[:, 0]
        matrices[name] = integer_matrix(parametrised.original.detach(), scales, bits)
    return matrices


def detach(head: nn.Module) -> None:
    """Remove the fake quantisers; the float masters stay as plain weights."""
    for _, layer in list(linear_layers(head)):
        parametrize.remove_parametrizations(layer, "weight", leave_parametrized=False)
        layer.weight.requires_grad_(False)


def load_matrices(head: nn.Module, matrices: Mapping[str, IntegerMatrix]) -> None:
    """Put the real values of stored matrices into the linear layers of a float head (output layer untied)."""
    for name, layer in linear_layers(head):
        real = torch.from_numpy(matrices[name].real())
        layer.weight = nn.Parameter(real.to(layer.weight.dtype).to(layer.weight.device), requires_grad=False)
