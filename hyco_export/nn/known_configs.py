"""Configs of released models by Hub id or GGUF file, for estimates where a checkpoint is not on this machine.

Knows shapes only, as far as sizes depend on them: 26B-A4B's head and hand-off, and E2B, as the created checkpoints
have them; bodies after the published model cards. A config found on this machine always wins.
"""

from collections.abc import Callable

from transformers import Gemma3TextConfig, Gemma4AssistantConfig, PreTrainedConfig
from transformers.models.gemma4 import Gemma4TextConfig

from hyco_export.nn.created.head import head_config
from hyco_export.nn.created.scale import FULL, BodySize
from hyco_export.nn.created.slm import e2b_config, mobile_widths
from hyco_export.nn.created.verifier import LAYER_NAMES, text_config

A4B_PATTERN = 5 * "SSSSSF"
E4B_PATTERN = 7 * "SSSSSF"
GEMMA3_270M_PATTERN = 3 * "SSSSSF"


def _verifier_26b_a4b() -> Gemma4TextConfig:
    body = BodySize(FULL.verifier.hidden, FULL.verifier.intermediate, FULL.verifier.heads, A4B_PATTERN)
    experts = {"enable_moe_block": True, "num_experts": 128, "top_k_experts": 8, "moe_intermediate_size": 704}
    return text_config(FULL, body, **experts)


def _verifier_e4b() -> Gemma4TextConfig:
    return Gemma4TextConfig(
        hidden_size=2560,
        intermediate_size=10_240,
        num_hidden_layers=len(E4B_PATTERN),
        layer_types=[LAYER_NAMES[letter] for letter in E4B_PATTERN],
        num_attention_heads=8,
        num_key_value_heads=2,
        num_kv_shared_layers=18,
    )


def _head_e4b() -> Gemma4AssistantConfig:
    text = Gemma4TextConfig(
        hidden_size=256,
        intermediate_size=2048,
        num_hidden_layers=4,
        layer_types=[LAYER_NAMES[letter] for letter in "SSSF"],
        num_attention_heads=4,
        num_key_value_heads=2,
        hidden_size_per_layer_input=0,
        vocab_size_per_layer_input=0,
        num_kv_shared_layers=4,
    )
    return Gemma4AssistantConfig(text_config=text, backbone_hidden_size=2560)


def _mobile_e2b() -> Gemma4TextConfig:
    config = e2b_config()
    config.quantization_config = mobile_widths(config).to_dict()
    return config


def _gemma3_270m() -> Gemma3TextConfig:
    return Gemma3TextConfig(
        vocab_size=262_144,
        hidden_size=640,
        intermediate_size=2048,
        num_hidden_layers=len(GEMMA3_270M_PATTERN),
        layer_types=[LAYER_NAMES[letter] for letter in GEMMA3_270M_PATTERN],
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=256,
        sliding_window=512,
    )


KNOWN: dict[str, Callable[[], PreTrainedConfig]] = {
    "google/gemma-4-26B-A4B-it": _verifier_26b_a4b,
    "google/gemma-4-26B-A4B-it-assistant": lambda: head_config(FULL),
    "google/gemma-4-E4B-it": _verifier_e4b,
    "google/gemma-4-E4B-it-assistant": _head_e4b,
    "google/gemma-4-E2B-it-qat-mobile-transformers": _mobile_e2b,
    "gemma-3-270m-q4_k_m.gguf": _gemma3_270m,
}


def known_config(name: str) -> PreTrainedConfig | None:
    """The config of a released model by Hub id or GGUF file name, None for one that is not known here."""
    build = KNOWN.get(name)
    return build() if build else None
