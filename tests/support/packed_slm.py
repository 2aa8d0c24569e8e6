"""Seeded SLM checkpoints of a few thousand parameters in the packed layout, and what goes with them.

Integers are random bytes under random scales: nothing here packs or unpacks, so that readers are tested against
transformers' own unpacking.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import Gemma4ForCausalLM, Gemma4TextConfig, GemmaQuantizationConfig
from transformers.integrations.gemma_quant import QuantizedEmbedding, QuantizedLinear, replace_with_quant_layers

from tests.support.builders import TYPES

VOCAB = 96
WINDOW = 8
RINGS = {"sliding": 8, "full": 12}
ROWS = 6
SOFTNESS = 0.3  # of attention: with queries of full length random weights attend to one key and amplify every rounding
WIDTH_RULES = {r"per_layer_(input_gate|projection|model_projection)$": 8, r"layers\.(2|3|4)\.mlp\.": 2}


def slm_config(pattern: str = "SFSSF", **fields: Any) -> Gemma4TextConfig:
    """By default a small E2B: per-layer embeddings, three layers that share K/V and are twice as wide, a soft-cap."""
    shape: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 40,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "global_head_dim": 16,
        "hidden_size_per_layer_input": 4,
        "num_kv_shared_layers": 3,
        "use_double_wide_mlp": True,
        "final_logit_softcapping": 30.0,
        **fields,
    }
    return Gemma4TextConfig(
        vocab_size=VOCAB,
        vocab_size_per_layer_input=VOCAB,
        num_hidden_layers=len(pattern),
        layer_types=[TYPES[letter] for letter in pattern],
        sliding_window=WINDOW,
        max_position_embeddings=256,
        pad_token_id=0,
        tie_word_embeddings=False,
        **shape,
    )


def plain_config() -> Gemma4TextConfig:
    """No per-layer embeddings, nothing shared, values from keys in full layers, two kv heads, no soft-cap."""
    return slm_config(
        "SFF",
        num_key_value_heads=2,
        num_global_key_value_heads=2,
        attention_k_eq_v=True,
        hidden_size_per_layer_input=0,
        num_kv_shared_layers=0,
        use_double_wide_mlp=False,
        final_logit_softcapping=None,
    )


def save_packed_slm(folder: Path, config: Gemma4TextConfig | None = None, seed: int = 0) -> Path:
    """Write a checkpoint with random integers, uneven norms and layer scalars other than 1."""
    config = config or slm_config()
    settings = GemmaQuantizationConfig(
        num_bits=4,
        quantize_embeddings=True,
        module_quant_configs={pattern: {"num_bits": bits} for pattern, bits in WIDTH_RULES.items()},
        modules_to_not_convert=[],
    )
    generator = torch.Generator().manual_seed(seed)
    with torch.device("meta"):
        model = Gemma4ForCausalLM(config)
        replace_with_quant_layers(model, settings, [])
    tensors = {}
    for name, tensor in model.state_dict().items():
        tensors[name] = _random_tensor(name, tensor, generator)
    for name, module in model.named_modules():
        if isinstance(module, QuantizedLinear | QuantizedEmbedding):
            _fill_scales(tensors, name, module, generator)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config.architectures = ["Gemma4ForCausalLM"]
    config.quantization_config = settings.to_dict()
    config.save_pretrained(folder)
    return folder


def edit_config(folder: Path, **fields: Any) -> None:
    """Change keys of config.json; None removes one."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    for name, value in fields.items():
        config.pop(name, None)
        if value is not None:
            config[name] = value
    path.write_text(json.dumps(config))


def edit_tensors(folder: Path, **changes: Any) -> None:
    """Replace tensors (dots written as double underscores); None removes one."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for name, value in changes.items():
        key = name.replace("__", ".")
        assert key in tensors, key
        tensors.pop(key)
        if value is not None:
            tensors[key] = value
    save_file(tensors, path, metadata={"format": "pt"})


def random_ids(count: int, seed: int = 0) -> list[int]:
    """Token ids."""
    return np.random.default_rng(seed).integers(0, VOCAB, count).tolist()


def _random_tensor(name: str, like: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Bytes for packed weights; values around 1 for norms and layer scalars; activation scales that must be ignored."""
    if like.dtype == torch.uint8:
        return torch.randint(0, 256, like.shape, generator=generator, dtype=torch.uint8)
    if like.dtype == torch.int8:
        return torch.randint(-128, 128, like.shape, generator=generator, dtype=torch.int8)
    if name.endswith("activation_scale"):
        return torch.full(like.shape, 0.3)
    around_one = 0.5 + torch.rand(like.shape, generator=generator)
    return around_one * SOFTNESS if name.endswith("q_norm.weight") else around_one


def _fill_scales(
    tensors: dict[str, torch.Tensor],
    name: str,
    module: QuantizedLinear | QuantizedEmbedding,
    generator: torch.Generator,
) -> None:
    """Scales that give rows of about unit length, 0.5 to 1.5 times."""
    embedding = isinstance(module, QuantizedEmbedding)
    columns = module.embedding_dim if embedding else module.in_features
    unit = 1.0 / (2.0 ** (module.num_bits - 1) * columns**0.5)
    key = f"{name}.embedding_scale" if embedding else f"{name}.weight_scale"
    tensors[key] = unit * (0.5 + torch.rand(tensors[key].shape, generator=generator))
