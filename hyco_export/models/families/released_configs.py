"""Configs of released models by Hub id or GGUF file name, and of created checkpoints with their shapes.

Estimates use them for checkpoints that are not on this machine. Only fields that decide sizes are set: those of
26B-A4B's head and hand-off and of E2B's structure, and the widths and depths of published model cards.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from transformers import (
    Gemma3TextConfig,
    Gemma4AssistantConfig,
    Gemma4TextConfig,
    GemmaQuantizationConfig,
    PreTrainedConfig,
)

from hyco_export.errors import RecipeError

PAD_ID, BOS_ID, SOFT_CAP = 0, 2, 30.0  # as every Gemma 4 has them

# ---- sizes of the created checkpoints


@dataclass(frozen=True)
class AttentionSize:
    """Sizes of the K/V that the verifier stores and the head reads."""

    kv_heads: int
    global_kv_heads: int
    head_dim: int
    global_head_dim: int
    sliding_window: int


@dataclass(frozen=True)
class BodySize:
    """Width and layers of a verifier or head."""

    hidden: int
    intermediate: int
    heads: int
    pattern: str


@dataclass(frozen=True)
class SlmSize:
    """Gemma 4 E2B's structure with fewer layers, in its own widths or (`narrow`) in some of a tiny model.

    `head_dims` of narrow layers: sliding, full. They decide how large the rings are.
    """

    layers: int
    shared: int
    narrow: bool
    head_dims: tuple[int, int] = (32, 64)


@dataclass(frozen=True)
class RunSize:
    """Settings of the recipe beside the checkpoints: enough to run every stage, too few to train well."""

    keepset: int
    window: int  # of the head's ring and the SLM's full layers; sliding layers have half
    prefill_rows: int
    prompts: int  # of each of the two sets
    new_tokens: int
    qat_steps: int
    clip_ratios: int


@dataclass(frozen=True)
class Scale:
    """One size of the whole family."""

    name: str
    vocab_size: int
    attention: AttentionSize
    verifier: BodySize
    head: BodySize
    slm: SlmSize
    run: RunSize


FULL = Scale(
    name="full",
    vocab_size=262_144,
    attention=AttentionSize(kv_heads=8, global_kv_heads=2, head_dim=256, global_head_dim=512, sliding_window=1024),
    verifier=BodySize(hidden=2816, intermediate=2112, heads=16, pattern="SSF"),
    head=BodySize(hidden=1024, intermediate=8192, heads=16, pattern="SSSF"),
    slm=SlmSize(layers=35, shared=20, narrow=False),
    run=RunSize(keepset=86_089, window=1024, prefill_rows=128, prompts=3, new_tokens=32, qat_steps=2, clip_ratios=3),
)
THIN = Scale(  # whatever grows with vocabulary, window or rings is as large as in FULL, all else as small as it goes
    name="thin",
    vocab_size=FULL.vocab_size,
    attention=FULL.attention,
    verifier=BodySize(hidden=256, intermediate=192, heads=16, pattern="SSF"),
    head=BodySize(hidden=128, intermediate=512, heads=16, pattern="SSSF"),
    slm=SlmSize(layers=20, shared=5, narrow=True, head_dims=(256, 512)),  # 15 layers with rings, as E2B
    run=RunSize(keepset=86_089, window=1024, prefill_rows=128, prompts=3, new_tokens=24, qat_steps=2, clip_ratios=3),
)
MIDDLE = Scale(
    name="middle",
    vocab_size=32_768,
    attention=AttentionSize(kv_heads=4, global_kv_heads=1, head_dim=64, global_head_dim=128, sliding_window=256),
    verifier=BodySize(hidden=704, intermediate=528, heads=8, pattern="SSF"),
    head=BodySize(hidden=256, intermediate=2048, heads=8, pattern="SSSF"),
    slm=SlmSize(layers=10, shared=5, narrow=False),
    run=RunSize(keepset=8_192, window=256, prefill_rows=64, prompts=4, new_tokens=32, qat_steps=2, clip_ratios=3),
)
SMALL = Scale(
    name="small",
    vocab_size=4_096,
    attention=AttentionSize(kv_heads=2, global_kv_heads=1, head_dim=32, global_head_dim=64, sliding_window=64),
    verifier=BodySize(hidden=128, intermediate=96, heads=4, pattern="SSF"),
    head=BodySize(hidden=64, intermediate=512, heads=4, pattern="SSSF"),
    slm=SlmSize(layers=10, shared=5, narrow=True),
    run=RunSize(keepset=1_536, window=128, prefill_rows=32, prompts=3, new_tokens=24, qat_steps=2, clip_ratios=3),
)
SCALES = {scale.name: scale for scale in (FULL, THIN, MIDDLE, SMALL)}


def find_scale(name: str) -> Scale:
    """The scale called `name`.

    Raises:
        RecipeError: there is none.
    """
    if name not in SCALES:
        raise RecipeError(f"--scale is {name!r}", f"give one of: {', '.join(SCALES)}")
    return SCALES[name]


E2B_LAYERS, E2B_SHARED = 35, 20
E2B_PATTERN = "SSSSF"


def e2b_config(layers: int = E2B_LAYERS, shared: int = E2B_SHARED, vocab_size: int = 262_144) -> Gemma4TextConfig:
    """The text model of Gemma 4 E2B, or one of the same widths with fewer layers.

    The last `shared` layers reuse keys and values and have MLPs of twice the width.
    """
    return _config(
        layers,
        shared,
        vocab_size,
        hidden_size=1536,
        intermediate_size=6144,
        num_attention_heads=8,
        head_dim=256,
        global_head_dim=512,
        hidden_size_per_layer_input=256,
        sliding_window=512,
        max_position_embeddings=131_072,
    )


def small_config(
    vocab_size: int, layers: int = 10, shared: int = 5, head_dims: tuple[int, int] = (32, 64)
) -> Gemma4TextConfig:
    """The same structure with a fraction of a megabyte of weights."""
    return _config(
        layers,
        shared,
        vocab_size,
        hidden_size=64,
        intermediate_size=128,
        num_attention_heads=2,
        head_dim=head_dims[0],
        global_head_dim=head_dims[1],
        hidden_size_per_layer_input=8,
        sliding_window=64,
        max_position_embeddings=4096,
    )


def _config(layers: int, shared: int, vocab_size: int, **widths: Any) -> Gemma4TextConfig:
    return Gemma4TextConfig(
        vocab_size=vocab_size,
        vocab_size_per_layer_input=vocab_size,
        num_hidden_layers=layers,
        layer_types=layer_names((E2B_PATTERN * layers)[:layers]),
        num_key_value_heads=1,
        num_kv_shared_layers=shared,
        use_double_wide_mlp=True,
        final_logit_softcapping=SOFT_CAP,
        tie_word_embeddings=False,  # packed tables cannot be tied
        pad_token_id=PAD_ID,
        eos_token_id=[1, 6],
        bos_token_id=BOS_ID,
        **widths,
    )


def mobile_widths(config: Gemma4TextConfig) -> GemmaQuantizationConfig:
    """Bits as in the mobile release: 2 for the wide MLPs, output layer and token table, 8 for the gate and projections
    of the per-layer embeddings, 4 for the rest."""
    first = config.num_hidden_layers - config.num_kv_shared_layers
    wide = "|".join(str(index) for index in range(first, config.num_hidden_layers))
    rules = {
        r"per_layer_(input_gate|projection|model_projection)$": 8,
        r"(lm_head|embed_tokens)$": 2,
        **({rf"layers\.({wide})\.mlp\.": 2} if wide else {}),
    }
    return GemmaQuantizationConfig(
        num_bits=4,
        quantize_embeddings=True,
        module_quant_configs={pattern: {"num_bits": bits} for pattern, bits in rules.items()},
        modules_to_not_convert=[],
    )


MAX_POSITIONS = 4096


def layer_names(pattern: str) -> list[str]:
    """transformers' layer types; in the pattern S is sliding, F full attention."""
    return [{"S": "sliding_attention", "F": "full_attention"}[letter] for letter in pattern]


def verifier_config(scale: Scale) -> Gemma4TextConfig:
    """A verifier of this scale: as 26B-A4B (values from keys in full layers), with fewer layers and without experts."""
    return text_config(scale, scale.verifier, final_logit_softcapping=SOFT_CAP)


def text_config(scale: Scale, body: BodySize, **fields: Any) -> Gemma4TextConfig:
    """A text config of verifier or head, with what both have in common."""
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
        layer_types=layer_names(body.pattern),
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
        layer_types=layer_names(E4B_PATTERN),
        num_attention_heads=8,
        num_key_value_heads=2,
        num_kv_shared_layers=18,
    )


def _head_e4b() -> Gemma4AssistantConfig:
    text = Gemma4TextConfig(
        hidden_size=256,
        intermediate_size=2048,
        num_hidden_layers=4,
        layer_types=layer_names("SSSF"),
        num_attention_heads=4,
        num_key_value_heads=2,
        hidden_size_per_layer_input=0,
        vocab_size_per_layer_input=0,
        num_kv_shared_layers=4,
    )
    return Gemma4AssistantConfig(text_config=text, backbone_hidden_size=2560, use_ordered_embeddings=True)


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
        layer_types=layer_names(GEMMA3_270M_PATTERN),
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
    """The config of a released model by Hub id or GGUF file name; None: not known here."""
    build = KNOWN.get(name)
    return build() if build else None


def head_config(scale: Scale) -> Gemma4AssistantConfig:
    """A head of this scale; every layer reads the verifier's K/V."""
    layers = len(scale.head.pattern)
    text = text_config(scale, scale.head, vocab_size_per_layer_input=0, num_kv_shared_layers=layers)
    return Gemma4AssistantConfig(text_config=text, backbone_hidden_size=scale.verifier.hidden)
