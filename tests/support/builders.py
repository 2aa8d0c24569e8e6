"""A seeded family of a few thousand parameters: verifier, head and tokenizer, in memory or saved as checkpoints."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import (
    Gemma4AssistantConfig,
    Gemma4AssistantForCausalLM,
    Gemma4Config,
    Gemma4ForCausalLM,
    Gemma4ForConditionalGeneration,
    Gemma4TextConfig,
    Gemma4VisionConfig,
    PreTrainedTokenizerFast,
)

from hyco_export.dev.tiny.configs import train_tokenizer

HIDDEN = 16  # of the verifier
HEAD_WIDTH = 24
SLIDING_WINDOW = 6
TEXTS = ("Brackets nest.", "A list keeps order and a set does not.", "What does a list keep?", "Say it again, please.")
ATTENTION = {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_global_key_value_heads": 1,
    "head_dim": 8,
    "global_head_dim": 16,
    "attention_k_eq_v": True,
}
TYPES = {"S": "sliding_attention", "F": "full_attention"}


def small_tokenizer() -> PreTrainedTokenizerFast:
    """A few hundred entries, with the embedded family's specials, byte tokens and chat template."""
    return train_tokenizer(list(TEXTS) * 20)


def text_config(pattern: str, vocab_size: int, hidden_size: int, **fields: Any) -> Gemma4TextConfig:
    """`pattern`: S sliding, F full attention."""
    shape = {**ATTENTION, "intermediate_size": 2 * hidden_size, "hidden_size_per_layer_input": 0, **fields}
    return Gemma4TextConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        num_hidden_layers=len(pattern),
        layer_types=[TYPES[letter] for letter in pattern],
        sliding_window=SLIDING_WINDOW,
        max_position_embeddings=512,
        pad_token_id=0,
        bos_token_id=2,
        eos_token_id=[1, 6],
        **shape,
    )


def small_verifier(vocab_size: int, pattern: str = "SSFSF", seed: int = 0, **fields: Any) -> Gemma4ForCausalLM:
    """A verifier whose next token depends on position, order and context."""
    model = Gemma4ForCausalLM(text_config(pattern, vocab_size, HIDDEN, final_logit_softcapping=30.0, **fields))
    _randomise(model, seed)
    return model.eval().requires_grad_(False)


def small_head(vocab_size: int, seed: int = 1, **fields: Any) -> Gemma4AssistantForCausalLM:
    """A head that reads `small_verifier`'s K/V; the second layer has a scalar of its own."""
    pattern = "SSF"
    text = text_config(
        pattern, vocab_size, HEAD_WIDTH, num_kv_shared_layers=len(pattern), vocab_size_per_layer_input=0, **fields
    )
    head = Gemma4AssistantForCausalLM(Gemma4AssistantConfig(text_config=text, backbone_hidden_size=HIDDEN))
    _randomise(head, seed)
    head.model.layers[1].layer_scalar.fill_(0.75)
    return head.eval().requires_grad_(False)


def save_multimodal(folder: Path, text: Gemma4ForCausalLM) -> Path:
    """The same text model in a checkpoint as the Hub has them, with a vision tower."""
    vision = Gemma4VisionConfig(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=8,
        position_embedding_size=16,
    )
    last = text.config.vocab_size - 1
    marks = dict.fromkeys(("image_token_id", "video_token_id", "audio_token_id", "boi_token_id", "eoi_token_id"), last)
    config = Gemma4Config(text_config=text.config, vision_config=vision, **marks)
    model = Gemma4ForConditionalGeneration(config)
    model.model.language_model.load_state_dict(text.model.state_dict())
    model.lm_head.load_state_dict(text.lm_head.state_dict())
    model.save_pretrained(folder)
    return folder


def save_family(folder: Path, dtype: torch.dtype = torch.float32) -> Path:
    """Checkpoint folders `verifier` (with tokenizer) and `head` inside `folder`."""
    tokenizer = small_tokenizer()
    small_verifier(len(tokenizer)).to(dtype).save_pretrained(folder / "verifier")
    tokenizer.save_pretrained(folder / "verifier")
    small_head(len(tokenizer)).to(dtype).save_pretrained(folder / "head")
    return folder


def random_ids(count: int, vocab_size: int, seed: int = 0) -> Sequence[int]:
    """Token ids, seeded."""
    return torch.randint(7, vocab_size, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def _randomise(model: torch.nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim >= 2:
                spread = 0.5 if "embed_tokens" in name else 1.5 * parameter.shape[-1] ** -0.5
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * spread)
            else:
                # Gemma 4 does not scale attention scores: q_norm near 1 would make random attention one-hot
                centre = parameter.shape[0] ** -0.5 if "q_norm" in name else 1.0
                parameter.copy_(centre * (0.5 + torch.rand(parameter.shape, generator=generator)))
