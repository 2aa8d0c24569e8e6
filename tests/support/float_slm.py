"""Seeded unquantised SLM checkpoints of a few thousand parameters, one of each family, as transformers saves them."""

from pathlib import Path
from typing import Any

import torch
from transformers import Gemma3TextConfig, Gemma4TextConfig, LlamaConfig, PreTrainedConfig, Qwen3Config

from hyco_export.models.families.slm_family import find_family
from tests.support.builders import TYPES
from tests.support.packed_slm import SOFTNESS, VOCAB, WINDOW, plain_config, slm_config

SCORE_DIVISORS = {"gemma3_text": 24, "qwen3": 16}  # of families that divide scores by its root
ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
}


def gemma3_config(pattern: str = "SSFSF", **fields: Any) -> Gemma3TextConfig:
    """A small Gemma 3: local and global rotary bases, the global one stretched, a scale of the scores of its own."""
    shape: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 40,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "query_pre_attn_scalar": 24,
        "rope_parameters": ROPE,
        "vocab_size": VOCAB,
        **fields,
    }
    return Gemma3TextConfig(
        num_hidden_layers=len(pattern),
        layer_types=[TYPES[letter] for letter in pattern],
        sliding_window=WINDOW,
        max_position_embeddings=256,
        pad_token_id=0,
        **shape,
    )


DENSE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def qwen3_config(**fields: Any) -> Qwen3Config:
    """A small Qwen 3: heads wider than the hidden size, tied."""
    return Qwen3Config(**{**DENSE, "head_dim": 16, "tie_word_embeddings": True, "rope_theta": 1e6, **fields})


def llama_config(**fields: Any) -> LlamaConfig:
    """A small Llama 3: stretched rotary positions, an output layer of its own."""
    return LlamaConfig(**{**DENSE, "rope_parameters": LLAMA3_ROPE, "tie_word_embeddings": False, **fields})


def tied(config: Gemma4TextConfig) -> Gemma4TextConfig:
    """The same model with the token table as its output layer."""
    config.tie_word_embeddings = True
    return config


CONFIGS = {
    "gemma3": gemma3_config,
    "gemma3-capped": lambda: gemma3_config("SF", num_key_value_heads=1, final_logit_softcapping=30.0),
    "gemma4-like-e2b": lambda: tied(slm_config()),
    "gemma4-values-from-keys": plain_config,
    "qwen3": qwen3_config,
    "qwen3-untied-sliding": lambda: qwen3_config(
        tie_word_embeddings=False, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=2
    ),
    "llama": llama_config,
    "llama-tied": lambda: llama_config(tie_word_embeddings=True, num_key_value_heads=1, rope_parameters=None),
}


def save_float_slm(folder: Path, config: PreTrainedConfig | None = None, seed: int = 0) -> Path:
    """Write a checkpoint with random weights, uneven norms and layer scalars other than 1."""
    config = config or gemma3_config()
    model = find_family(config, folder).model(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            tensor.copy_(_values(name, tensor, generator, config))
    model.save_pretrained(folder)
    return folder


def _values(name: str, like: torch.Tensor, generator: torch.Generator, config: PreTrainedConfig) -> torch.Tensor:
    """Rows of about unit length for matrices; norms from 0.5 to 1.5 (Gemma 3 stores them less 1), queries' shorter."""
    if like.ndim > 1:
        return torch.randn(like.shape, generator=generator) * like.shape[-1] ** -0.5
    factor = 0.5 + torch.rand(like.shape, generator=generator)
    if name.endswith("q_norm.weight"):
        factor *= SOFTNESS * SCORE_DIVISORS.get(config.model_type, 1) ** 0.5
    return factor - 1.0 if isinstance(config, Gemma3TextConfig) else factor
