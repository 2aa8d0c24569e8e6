"""Seeded random Gemma 4 models, a few thousand parameters each, in the structures that a verifier can have."""

from functools import cache
from typing import Any

import torch
from transformers import Gemma4AssistantConfig, Gemma4AssistantForCausalLM, Gemma4ForCausalLM, Gemma4TextConfig

VOCAB = 48
HIDDEN = 16
WINDOW = 6
CONTEXT = 512
STOP_IDS = [1, 3]
LAYER_TYPES = {"S": "sliding_attention", "F": "full_attention"}
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_global_key_value_heads": 1,
    "head_dim": 8,
    "global_head_dim": 16,
    "sliding_window": WINDOW,
    "max_position_embeddings": CONTEXT,
    "pad_token_id": 0,
    "bos_token_id": 2,
    "eos_token_id": STOP_IDS,
}
# name -> layer pattern and what differs
STRUCTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "k_eq_v": ("SSFSSF", {"attention_k_eq_v": True, "final_logit_softcapping": 30.0}),
    "shared with per-layer embeddings": (
        "SFSFSF",
        {
            "num_kv_shared_layers": 2,
            "hidden_size_per_layer_input": 4,
            "vocab_size_per_layer_input": VOCAB,
            "use_double_wide_mlp": True,
        },
    ),
    "shared without per-layer embeddings": ("SFSF", {"num_kv_shared_layers": 2}),
    "experts": (
        "SSF",
        {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 8},
    ),
}


def text_config(pattern: str, **fields: Any) -> Gemma4TextConfig:
    return Gemma4TextConfig(
        num_hidden_layers=len(pattern),
        layer_types=[LAYER_TYPES[letter] for letter in pattern],
        **{**SHAPE, "hidden_size_per_layer_input": 0, **fields},
    )


def randomise(model: torch.nn.Module, seed: int) -> None:
    """Weights that make the next token depend on position, order and context, with logits of a moderate spread."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim >= 2:
                scale = 0.25 if "embed_tokens" in name else parameter.shape[-1] ** -0.5
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
            else:
                # Gemma 4 does not scale its attention scores: with q_norm near 1 random layers amplify rounding errors
                centre = parameter.shape[0] ** -0.5 if "q_norm" in name else 1.0
                parameter.copy_(centre * (0.5 + torch.rand(parameter.shape, generator=generator)))


@cache
def tiny_verifier(structure: str = "k_eq_v", seed: int = 0) -> Gemma4ForCausalLM:
    pattern, fields = STRUCTURES[structure]
    model = Gemma4ForCausalLM(text_config(pattern, **fields))
    randomise(model, seed)
    return model.eval().requires_grad_(False)


@cache
def tiny_head(structure: str = "k_eq_v", seed: int = 1) -> Gemma4AssistantForCausalLM:
    _, fields = STRUCTURES[structure]
    k_eq_v = fields.get("attention_k_eq_v", False)
    text = text_config("SSF", num_kv_shared_layers=3, vocab_size_per_layer_input=0, attention_k_eq_v=k_eq_v)
    model = Gemma4AssistantForCausalLM(Gemma4AssistantConfig(text_config=text, backbone_hidden_size=HIDDEN))
    randomise(model, seed)
    return model.eval().requires_grad_(False)
