"""Writes a trained SLM in the form of Google's mobile checkpoint: packed 2-, 4- and 8-bit weights.

The layout is the one that transformers' Gemma quantizer reads: `<linear>.weight` + `<linear>.weight_scale`,
`<embedding>.embedding_quantized` + `<embedding>.embedding_scale`, two activation scales per linear, one scale per key
and value cache of a layer that stores them. Legend: O output channels (rows), I input channels (columns).
"""

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn
from transformers import Gemma4ForCausalLM

from hyco_export.errors import CheckpointError
from hyco_export.nn.tiny.fake_quant import (
    DEFAULT_WIDTH,
    WIDTH_RULES,
    fake_quant_of,
    module_width,
    quantised_modules,
)

VALUES_PER_BYTE = {2: 4, 4: 2}


def save_packed(
    slm: Gemma4ForCausalLM,
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
    config.architectures = ["Gemma4ForCausalLM"]
    config.dtype = "float32"
    config.quantization_config = quantization_config()
    config.save_pretrained(folder)
    slm.generation_config.save_pretrained(folder)


def quantization_config() -> dict[str, object]:
    """The `quantization_config` of config.json."""
    return {
        "quant_method": "gemma",
        "num_bits": DEFAULT_WIDTH,
        "quantize_embeddings": True,
        "module_quant_configs": {pattern: {"num_bits": bits} for pattern, bits in WIDTH_RULES.items()},
        "modules_to_not_convert": [],
    }


def packed_tensors(
    slm: Gemma4ForCausalLM, activation_scales: Mapping[str, tuple[float, float]]
) -> dict[str, torch.Tensor]:
    """Every tensor of the packed file, but for the cache scales."""
    modules = quantised_modules(slm)
    tensors = {
        name: tensor.contiguous()
        for name, tensor in slm.state_dict().items()
        if not any(name.startswith(f"{module}.") for module in modules)
    }
    for name, module in modules.items():
        quantiser, weight = fake_quant_of(module)
        stored = pack(quantiser.integers(weight), module_width(name))
        scale = quantiser.scale.detach().clone()
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


def pack(integers: torch.Tensor, bits: int) -> torch.Tensor:
    """Integers [O, I] int8 -> storage: 8 bits unchanged, else uint8 [O, I * bits / 8], first value in the low bits."""
    if bits == 8:
        return integers
    count = VALUES_PER_BYTE[bits]
    if integers.shape[1] % count:
        raise CheckpointError(
            f"{integers.shape[1]} columns cannot be packed {count} to a byte", f"choose a multiple of {count}"
        )
    unsigned = (integers.to(torch.int16) + 2 ** (bits - 1)).reshape(len(integers), -1, count)
    shifts = torch.arange(count, dtype=torch.int16) * bits
    return (unsigned << shifts).sum(-1).to(torch.uint8)
