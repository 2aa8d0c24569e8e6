"""A head's linear layers: their names, their weights, and other weights put in their place. Knows no grids."""

from collections.abc import Iterator, Mapping

import torch
from torch import nn
from transformers import Gemma4AssistantForCausalLM

from hyco_export.core.network.weights import IntegerMatrix


def linear_layers(head: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    """Every linear layer by its name in the module: projections, attention, MLPs, output layer."""
    for name, module in head.named_modules():
        if isinstance(module, nn.Linear):
            yield name, module


def linear_weights(head: nn.Module) -> dict[str, torch.Tensor]:
    """Weight [N, K] of every linear layer by its name in the module, without a gradient."""
    return {name: layer.weight.detach() for name, layer in linear_layers(head)}


def untie_output_layer(head: Gemma4AssistantForCausalLM) -> None:
    """Give the output layer weights of its own; the tied table is never looked up by a head."""
    head.lm_head.weight = nn.Parameter(head.lm_head.weight.detach().clone(), requires_grad=False)


def load_matrices(head: nn.Module, matrices: Mapping[str, IntegerMatrix]) -> None:
    """Put the real values of stored matrices into the linear layers of a float head (output layer untied)."""
    for name, layer in linear_layers(head):
        load_weight(layer, torch.from_numpy(matrices[name].real()))


def load_weight(layer: nn.Linear, real: torch.Tensor) -> None:
    """Put a weight [N, K] into a layer of a float head; the one it had stays as it is for those who hold it."""
    layer.weight = nn.Parameter(real.to(layer.weight.dtype).to(layer.weight.device), requires_grad=False)
