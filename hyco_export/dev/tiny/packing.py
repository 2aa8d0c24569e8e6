"""Fake quantisation of an SLM's weights in training, and its checkpoint in the layout of Google's mobile release:
packed 2-, 4- and 8-bit integers.

The layout is the one that transformers' Gemma quantizer reads: `<linear>.weight` + `<linear>.weight_scale`,
`<embedding>.embedding_quantized` + `<embedding>.embedding_scale`, two activation scales per linear, one scale per key
and value cache of a layer that stores them.

Legend: O output channels (rows), I input channels (columns).
"""

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from aimet_torch.quantization.affine import quantize_dequantize
from safetensors.torch import save_file
from torch import nn
from torch.nn.utils import parametrize
from transformers import DynamicCache

from hyco_export.core.encodings import symmetric_limits
from hyco_export.core.network.weights import PackedMatrix
from hyco_export.dev.tiny.training import Row, ordered_batches, padded_ids
from hyco_export.models.families.gemma4 import LanguageModel
from hyco_export.models.families.gemma4_packed import PackingConfig
from hyco_export.models.weight_rounding import integer_matrix, searched_scales

# ---- fake quantisation with learned scales (LSQ, Esser et al. 2020)

WIDTH_RULES: dict[str, int] = {
    r"per_layer_(input_gate|projection|model_projection)$": 8,
    r"layers\.(2|3|4)\.mlp\.": 2,
}
"""Module-name pattern -> bits, first match wins; layers 2-4 share keys and values and have double-wide MLPs."""

DEFAULT_WIDTH = 4
"""Attention, the other MLPs, token and per-layer embeddings, output layer."""

CLIP_RATIOS = 1.0 - 0.05 * np.arange(15)
"""Starting scales tried per channel, as shares of the scale at which the largest magnitude is the lowest integer."""

LEAST_SCALE = 1e-6
"""Of the row of the padding token, which is all zeros: the logarithm of a scale must be finite."""


def module_width(name: str) -> int:
    """Bits of the linear or embedding called `name`."""
    return next((bits for pattern, bits in WIDTH_RULES.items() if re.search(pattern, name)), DEFAULT_WIDTH)


class FakeQuant(nn.Module):
    """Weight [O, I] -> the same weight on its grid; gradients pass the rounding and reach the scales.

    Scales are trained by their logarithm, so that a step changes a small one and a large one by the same share.
    """

    def __init__(self, weight: torch.Tensor, bits: int) -> None:
        super().__init__()
        self.bits = bits
        lowest, highest = symmetric_limits(bits)
        scales = searched_scales(weight, bits, CLIP_RATIOS * highest / -lowest)  # [O]
        self.log_scale = nn.Parameter(scales.clamp_min(LEAST_SCALE)[:, None].log())

    @property
    def scale(self) -> torch.Tensor:
        """Positive scales [O, 1]."""
        return self.log_scale.exp()

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        scale = self.scale
        lowest, highest = symmetric_limits(self.bits)
        # clipped before it is rounded: aimet-torch alone would count half a step beyond the ends as inside the range
        inside = weight.clamp(lowest * scale, highest * scale)
        return quantize_dequantize(inside, scale, torch.zeros_like(scale), lowest, highest)

    def packed(self, weight: torch.Tensor) -> PackedMatrix:
        """The integers and scales that are stored for weight [O, I]."""
        return integer_matrix(weight, self.scale.detach()[:, 0], self.bits).packed()


def quantised_modules(model: nn.Module) -> dict[str, nn.Linear | nn.Embedding]:
    """Every linear and embedding by name: all of them are stored as integers."""
    return {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear | nn.Embedding)}


def attach_fake_quant(model: nn.Module) -> None:
    """From now on every linear and embedding of `model` computes with weights on its grid."""
    for name, module in quantised_modules(model).items():
        parametrize.register_parametrization(module, "weight", FakeQuant(module.weight.detach(), module_width(name)))


def fake_quant_of(module: nn.Module) -> tuple[FakeQuant, torch.Tensor]:
    """The quantiser attached to a module and the float weight [O, I] behind it.

    Raises:
        TypeError: none is attached.
    """
    parametrization = module.get_submodule("parametrizations.weight")
    quantiser = parametrization.get_submodule("0")
    if not isinstance(quantiser, FakeQuant):
        raise TypeError(f"{type(module).__name__} has no fake quantiser: call attach_fake_quant first")
    return quantiser, parametrization.get_parameter("original").detach()


# ---- the packed checkpoint


def save_packed(
    slm: LanguageModel,
    folder: Path,
    *,
    cache_scales: Mapping[str, float],
    activation_scales: Mapping[str, tuple[float, float]],
) -> None:
    """Write config, generation config and packed weights of an SLM with fake quantisers attached.

    `activation_scales` maps linears to (input, output) scales; 0 means uncalibrated, and transformers then leaves the
    activations alone. `cache_scales` maps `model.layers.N.self_attn.k_cache_scale` and its like to a scale.
    """
    tensors = packed_tensors(slm, activation_scales)
    tensors |= {name: torch.tensor(scale) for name, scale in cache_scales.items()}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)
    config = type(slm.config).from_dict(slm.config.to_dict())
    config.architectures = [LanguageModel.__name__]
    config.dtype = "float32"
    config.quantization_config = packing_config().to_dict()
    config.save_pretrained(folder)
    slm.generation_config.save_pretrained(folder)


def packing_config() -> PackingConfig:
    """The widths as transformers' quantizer reads them from config.json."""
    return PackingConfig(
        num_bits=DEFAULT_WIDTH,
        quantize_embeddings=True,
        module_quant_configs={pattern: {"num_bits": bits} for pattern, bits in WIDTH_RULES.items()},
        modules_to_not_convert=[],
    )


def packed_tensors(slm: LanguageModel, activation_scales: Mapping[str, tuple[float, float]]) -> dict[str, torch.Tensor]:
    """Every tensor of the packed file, but for the cache scales."""
    modules = quantised_modules(slm)
    tensors = {
        name: tensor.contiguous()
        for name, tensor in slm.state_dict().items()
        if not any(name.startswith(f"{module}.") for module in modules)
    }
    for name, module in modules.items():
        quantiser, weight = fake_quant_of(module)
        packed = quantiser.packed(weight)
        stored, scale = torch.from_numpy(packed.integers), torch.from_numpy(packed.scales)[:, None]
        if isinstance(module, nn.Embedding):
            tensors |= {f"{name}.embedding_quantized": stored, f"{name}.embedding_scale": scale}
            continue
        before, after = activation_scales.get(name, (0.0, 0.0))
        tensors |= {
            f"{name}.weight": stored,
            f"{name}.weight_scale": scale,
            f"{name}.input_activation_scale": torch.tensor(before),
            f"{name}.output_activation_scale": torch.tensor(after),
        }
    return tensors


# ---- static ranges of the cache and of activations

INT8_MAX = 127

RANGE_QUANTILE = 0.999
RANGE_MARGIN = 1.2
"""The range is 1.2 x the 99.9th percentile of the magnitudes: the rule of the paper's conversion for the K/V cache."""


@torch.no_grad()
def cache_scales(slm: LanguageModel, rows: Sequence[Row]) -> dict[str, float]:
    """8-bit scales of what each storing layer writes into its cache, by checkpoint name."""
    seen: dict[str, list[torch.Tensor]] = defaultdict(list)
    for batch in ordered_batches(rows):
        cache = DynamicCache()
        slm.model(input_ids=padded_ids(batch), cache=cache, use_cache=True)
        for index, (keys, values, *_) in enumerate(cache):
            seen[f"model.layers.{index}.self_attn.k_cache_scale"].append(_percentile(keys))
            seen[f"model.layers.{index}.self_attn.v_cache_scale"].append(_percentile(values))
    return {name: _scale(percentiles) for name, percentiles in seen.items()}


@torch.no_grad()
def activation_scales(slm: LanguageModel, rows: Sequence[Row]) -> dict[str, tuple[float, float]]:
    """8-bit (input, output) scales of every linear, by module name."""
    inputs: dict[str, list[torch.Tensor]] = defaultdict(list)
    outputs: dict[str, list[torch.Tensor]] = defaultdict(list)

    def watch(name: str, module: nn.Module) -> torch.utils.hooks.RemovableHandle:
        def keep(_module: nn.Module, before: tuple[torch.Tensor, ...], after: torch.Tensor) -> None:
            inputs[name].append(_percentile(before[0]))
            outputs[name].append(_percentile(after))

        return module.register_forward_hook(keep)

    handles = [watch(name, module) for name, module in slm.named_modules() if isinstance(module, nn.Linear)]
    for batch in ordered_batches(rows):
        slm(input_ids=padded_ids(batch), use_cache=False)
    for handle in handles:
        handle.remove()
    return {name: (_scale(inputs[name]), _scale(outputs[name])) for name in inputs}


def _percentile(values: torch.Tensor) -> torch.Tensor:
    """The magnitude at RANGE_QUANTILE of one batch's values."""
    magnitudes = values.abs().flatten()
    return magnitudes.kthvalue(max(1, int(RANGE_QUANTILE * len(magnitudes)))).values


def _scale(percentiles: Sequence[torch.Tensor]) -> float:
    """The largest batch's percentile, with its margin, over the largest 8-bit integer."""
    return RANGE_MARGIN * float(torch.stack(list(percentiles)).max()) / INT8_MAX
