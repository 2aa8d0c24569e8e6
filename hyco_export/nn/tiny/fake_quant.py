"""Fake quantisation of the SLM's weights while it trains, with learned scales (LSQ, Esser et al. 2020).

Symmetric, one scale per output channel (per row of a table), the widths of Google's mobile checkpoint.
Legend: O output channels (rows), I input channels (columns).
"""

import re

import torch
from torch import nn
from torch.nn.utils import parametrize

WIDTH_RULES: dict[str, int] = {
    r"per_layer_(input_gate|projection|model_projection)$": 8,
    r"layers\.(2|3|4)\.mlp\.": 2,
}
"""Module-name pattern -> bits, first match wins; layers 2-4 share keys and values and have double-wide MLPs."""

DEFAULT_WIDTH = 4
"""Attention, the other MLPs, token and per-layer embeddings, output layer."""

CLIP_RATIOS = [1.0 - 0.05 * step for step in range(15)]
"""Starting scales tried per channel, as shares of the scale that reaches the largest weight."""


def module_width(name: str) -> int:
    """Bits of the linear or embedding called `name`."""
    return next((bits for pattern, bits in WIDTH_RULES.items() if re.search(pattern, name)), DEFAULT_WIDTH)


def integer_range(bits: int) -> tuple[int, int]:
    """Smallest and largest integer: -8 and 7 for 4 bits."""
    return -(2 ** (bits - 1)), 2 ** (bits - 1) - 1


class FakeQuant(nn.Module):
    """Weight [O, I] -> the same weight on its grid; gradients pass the rounding and reach the scales."""

    def __init__(self, weight: torch.Tensor, bits: int) -> None:
        super().__init__()
        self.bits = bits
        self.log_scale = nn.Parameter(_best_scale(weight, bits).log())

    @property
    def scale(self) -> torch.Tensor:
        """Positive scales [O, 1]."""
        return self.log_scale.exp()

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        scale = self.scale
        clipped = (weight / scale).clamp(*integer_range(self.bits))
        rounded = clipped + (clipped.round() - clipped).detach()
        return rounded * scale

    def integers(self, weight: torch.Tensor) -> torch.Tensor:
        """The stored integers [O, I], int8."""
        return (weight / self.scale).clamp(*integer_range(self.bits)).round().to(torch.int8)


def quantised_modules(model: nn.Module) -> dict[str, nn.Linear | nn.Embedding]:
    """Every linear and embedding by name: all of them are stored as integers."""
    return {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear | nn.Embedding)}


def attach_fake_quant(model: nn.Module) -> None:
    """From now on every linear and embedding of `model` computes with weights on its grid."""
    for name, module in quantised_modules(model).items():
        parametrize.register_parametrization(module, "weight", FakeQuant(module.weight.detach(), module_width(name)))


def fake_quant_of(module: nn.Module) -> tuple[FakeQuant, torch.Tensor]:
    """The quantiser attached to a module and the float weight [O, I] behind it."""
    parametrization = module.get_submodule("parametrizations.weight")
    quantiser = parametrization.get_submodule("0")
    if not isinstance(quantiser, FakeQuant):
        raise TypeError(f"{type(module).__name__} has no fake quantiser: call attach_fake_quant first")
    return quantiser, parametrization.get_parameter("original").detach()


def _best_scale(weight: torch.Tensor, bits: int) -> torch.Tensor:
    """Per row the scale [O, 1] with the least squared error among CLIP_RATIOS."""
    low, high = integer_range(bits)
    largest = (weight.abs().amax(dim=1, keepdim=True) / -low).clamp_min(1e-6)
    candidates = torch.stack([ratio * largest for ratio in CLIP_RATIOS])  # [ratios, O, 1]
    errors = ((weight / candidates).round().clamp(low, high) * candidates - weight).pow(2).sum(-1, keepdim=True)
    return candidates.gather(0, errors.argmin(dim=0, keepdim=True)).squeeze(0)
