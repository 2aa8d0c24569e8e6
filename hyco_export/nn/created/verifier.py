"""The created verifier: the hand-off of Gemma 4 26B-A4B (§3.1) from a small dense body. Random weights.

It has no stop token: a model that knows nothing would end an answer by chance only, and a run's length would be too.
"""

from pathlib import Path
from typing import Any

import torch
from transformers import Gemma4ForCausalLM, GenerationConfig
from transformers.models.gemma4 import Gemma4TextConfig

from hyco_export.nn.created.scale import BodySize, Scale
from hyco_export.nn.created.weights import Report, write_checkpoint
from hyco_export.nn.tiny.configs import SAMPLING, SOFT_CAP
from hyco_export.nn.tiny.tokenizer import BOS_ID, PAD_ID

MAX_POSITIONS = 4096
LAYER_NAMES = {"S": "sliding_attention", "F": "full_attention"}


def write_verifier(folder: Path, scale: Scale, seed: int, report: Report) -> None:
    """Write the checkpoint without its tokenizer into a new folder."""
    with torch.device("meta"):
        model = Gemma4ForCausalLM(verifier_config(scale))
    generation = GenerationConfig(pad_token_id=PAD_ID, bos_token_id=BOS_ID, **SAMPLING)
    write_checkpoint(model, folder, seed, generation, report)


def verifier_config(scale: Scale) -> Gemma4TextConfig:
    """As published for 26B-A4B, but for the number of layers and their MLPs: values from keys in full layers."""
    return text_config(scale, scale.verifier, final_logit_softcapping=SOFT_CAP)


def text_config(scale: Scale, body: BodySize, **fields: Any) -> Gemma4TextConfig:
    """What verifier and head have in common."""
    attention = scale.attention
    full: dict[str, int] = {  # of full layers; the config class takes them without declaring them
        "num_global_key_value_heads": attention.global_kv_heads,
        "global_head_dim": attention.global_head_dim,
    }
    return Gemma4TextConfig(
        vocab_size=scale.vocab_size,
        hidden_size=body.hidden,
        intermediate_size=body.intermediate,
        num_hidden_layers=len(body.pattern),
        layer_types=[LAYER_NAMES[letter] for letter in body.pattern],
        num_attention_heads=body.heads,
        num_key_value_heads=attention.kv_heads,
        head_dim=attention.head_dim,
        attention_k_eq_v=True,
        sliding_window=attention.sliding_window,
        hidden_size_per_layer_input=0,
        max_position_embeddings=MAX_POSITIONS,
        pad_token_id=PAD_ID,
        bos_token_id=BOS_ID,
        eos_token_id=None,
        **full,  # type: ignore[arg-type]
        **fields,
    )
