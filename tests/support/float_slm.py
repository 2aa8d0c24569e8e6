"""Seeded unquantised SLM checkpoints of a few thousand parameters: Gemma 3 and Gemma 4, as transformers saves them."""

from pathlib import Path
from typing import Any

import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, Gemma4ForCausalLM, Gemma4TextConfig

from tests.support.builders import TYPES
from tests.support.packed_slm import SOFTNESS, VOCAB, WINDOW, plain_config, slm_config

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


def tied(config: Gemma4TextConfig) -> Gemma4TextConfig:
    """The same model with the token table as its output layer."""
    config.tie_word_embeddings = True
    return config


CONFIGS = {
    "gemma3": gemma3_config,
    "gemma3-capped": lambda: gemma3_config("SF", num_key_value_heads=1, final_logit_softcapping=30.0),
    "gemma4-like-e2b": lambda: tied(slm_config()),
    "gemma4-values-from-keys": plain_config,
}


def save_float_slm(folder: Path, config: Gemma3TextConfig | Gemma4TextConfig | None = None, seed: int = 0) -> Path:
    """Write a checkpoint with random weights, uneven norms and layer scalars other than 1."""
    config = config or gemma3_config()
    kind = Gemma3ForCausalLM if isinstance(config, Gemma3TextConfig) else Gemma4ForCausalLM
    model = kind(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            tensor.copy_(_values(name, tensor, generator, centred_at_zero=kind is Gemma3ForCausalLM))
    model.save_pretrained(folder)
    return folder


def _values(name: str, like: torch.Tensor, generator: torch.Generator, centred_at_zero: bool) -> torch.Tensor:
    """Rows of about unit length for matrices; norms from 0.5 to 1.5 (Gemma 3 stores them less 1), queries' shorter."""
    if like.ndim > 1:
        return torch.randn(like.shape, generator=generator) * like.shape[-1] ** -0.5
    factor = 0.5 + torch.rand(like.shape, generator=generator)
    if name.endswith("q_norm.weight"):
        factor *= SOFTNESS * (24**0.5 if centred_at_zero else 1.0)
    return factor - 1.0 if centred_at_zero else factor
