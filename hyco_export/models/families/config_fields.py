"""Which fields of a model's config are honoured, which model types each role of a recipe takes, and which values no
model can have.

A field that changes what a model computes is either read, or must have a value that the static network implements; any
other value is refused by name. So is a field that transformers' class does not know: transformers' model, the reference
of every comparison, ignores it.
"""

import math
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, TypeGuard

from transformers import PreTrainedConfig

from hyco_export.errors import CheckpointError, first_line
from hyco_export.models.families.gemma4_assistant import HEAD_MODEL_TYPE, HONOURED
from hyco_export.models.families.slm_family import LAYERS, ROPE, Honoured, slm_families
from hyco_export.models.tensor_files import FETCH_HINT

FIXED_FREQUENCIES = ("default", "linear", "proportional", "llama3", "yarn")  # the same for every length of a text
LAYER_FIELDS = frozenset({"head_dim", "num_key_value_heads"})  # what may differ from layer to layer
# beginnings of fields that do not change the computation, or are checked elsewhere
NOTES = (
    *("_", "unsloth_", "model_type", "auto_map", "quantization_config", "transformers_weights"),
    *("cache_implementation", "output_attentions"),
)
REMOVE_HINT = "remove it from config.json if it says nothing of what the model computes, else use another model"
MEANING = {  # of fields whose names do not explain them
    "use_bidirectional_attention": "its attention looks ahead",
    "enable_moe_block": "it has mixture-of-experts blocks",
}


@cache
def converted() -> Mapping[str, Honoured]:
    """Fields of the models that become graphs, by transformers' model type: SLMs, a head, a head's text part."""
    found = {model_type: family.honoured for model_type, family in slm_families().items()}
    return {**found, HEAD_MODEL_TYPE: HONOURED}


def require_honoured(config: PreTrainedConfig, role: str) -> None:
    """Refuse a model that the static network would not compute as transformers does.

    Raises:
        CheckpointError: a field has a value that is not implemented, or is unknown; names field and value.
    """
    for problem, hint in not_honoured(config):
        raise CheckpointError(f"the {role} cannot run as a static graph: {problem}", hint)


def not_honoured(config: PreTrainedConfig) -> Iterator[tuple[str, str]]:
    """What is not implemented of a config and its text part, each with its next step; model types are not checked."""
    text = config.get_text_config()
    for part in (config,) if text is config else (config, text):
        if part.model_type in converted():
            yield from _unsupported_values(part, converted()[part.model_type])
            yield from _unsupported_parts(part)


def _unsupported_values(config: PreTrainedConfig, honoured: Honoured) -> Iterator[tuple[str, str]]:
    for name, value in config.to_dict().items():
        if name in honoured.only:
            if value not in honoured.only[name]:
                wanted = " or ".join(map(repr, honoured.only[name]))
                meaning = f" ({MEANING[name]})" if name in MEANING else ""
                yield f"{name} is {value!r}{meaning}, only {wanted} is implemented", _next_step(config)
        elif name not in honoured.read and not name.startswith(NOTES) and value not in (None, False, {}, []):
            yield f"{name} is {value!r}, a field that transformers' {type(config).__name__} does not know", REMOVE_HINT


def _unsupported_parts(config: PreTrainedConfig) -> Iterator[tuple[str, str]]:
    """Rotary kinds, and fields that differ from layer to layer, that are not implemented."""
    given = getattr(config, ROPE, None) or {}
    by_type = {f"{ROPE}.{layer_type}": rope for layer_type, rope in given.items() if isinstance(rope, dict)}
    for name, rope in (by_type or {ROPE: given}).items():  # a table for each layer type, or one for all
        if rope.get("rope_type", "default") not in FIXED_FREQUENCIES:
            wanted = ", ".join(FIXED_FREQUENCIES)
            yield f"{name}.rope_type is {rope['rope_type']!r}, not one of {wanted}", _next_step(config)
    for layer, own in (config.to_dict().get(LAYERS) or {}).items():
        for name in sorted(set(own) - LAYER_FIELDS):
            rule = "only one value for all layers is implemented"
            yield f"{LAYERS}.{layer}.{name} is {own[name]!r}, {rule}", _next_step(config)


def _next_step(config: PreTrainedConfig) -> str:
    return f"use a {config.model_type} model without it"


# ---- model types by role

# text parts of the models whose last layers store K/V for an assistant; a multimodal checkpoint holds one of them
VERIFIER_TEXT_TYPES = ("gemma4_text", "gemma4_unified_text")
HEAD_SUFFIX = "_assistant"
OTHER_TYPE_STEPS = (  # beginning of a model type, what to do with it
    ("gemma4", "it is a head or another part: the verifier is the Gemma 4 model that the head was published for"),
    ("gemma", "this generation has no MTP head: the verifier must be a Gemma 4 model; this one can be $.models.slm"),
    ("", "the verifier must be a Gemma 4 model: its published head reads K/V that other models do not hand out"),
)
FULL_PRECISION_HINT = (
    "name the BF16 checkpoint under $.models.verifier (a quantised one serves all the same), "
    "or allow it: $.models.allow_quantised_capture: true"
)


def require_verifier_type(config: PreTrainedConfig) -> None:
    """Refuse a verifier that does not hand K/V to a head.

    Raises:
        CheckpointError: it is of another type; the hint says what that type can be used for.
    """
    text = config.get_text_config()
    if text.model_type in VERIFIER_TEXT_TYPES and not config.model_type.endswith(HEAD_SUFFIX):
        return
    hint = next(step for beginning, step in OTHER_TYPE_STEPS if config.model_type.startswith(beginning))
    raise CheckpointError(f"a {config.model_type!r} model does not hand K/V to a head", hint)


def quantisation_method(config: PreTrainedConfig) -> str | None:
    """How the checkpoint's weights are quantised (awq, gptq, ...); None for plain weights."""
    for part in (config, config.get_text_config()):
        settings = getattr(part, "quantization_config", None)
        if settings:
            found = settings if isinstance(settings, dict) else settings.to_dict()
            method = found.get("quant_method", "unnamed")
            return str(getattr(method, "value", method))
    return None


def require_full_precision(config: PreTrainedConfig) -> None:
    """Refuse a quantised verifier for captures: the head is trained on the outputs of the full-precision model.

    Raises:
        CheckpointError: the weights are quantised.
    """
    if method := quantisation_method(config):
        message = f"the verifier's weights are quantised ({method}), a capture demands BF16"
        raise CheckpointError(message, FULL_PRECISION_HINT)


# ---- values that no model can have

COUNTS = (  # fields of a text config that must be finite and greater than 0 where they are given
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("head_dim", "vocab_size", "sliding_window", "max_position_embeddings", "final_logit_softcapping"),
    "rms_norm_eps",
)
ROPE_NUMBERS = ("rope_theta", "factor", "partial_rotary_factor")  # must be finite and greater than 0
ROPE_SHARE = "partial_rotary_factor"  # of a head's dimensions that rotate: at most all


def require_sizes(config: PreTrainedConfig, path: Path) -> None:
    """Refuse values that transformers accepts although no model can have them.

    Raises:
        CheckpointError: a count is not positive or below 0, a rotary number that no model can have, or layers share
            K/V that none stores; names the field.
    """
    text = config.get_text_config()
    fields = text.to_dict()
    for values in (fields, *(fields.get("per_layer_config") or {}).values()):
        for name, value in values.items():
            if name in COUNTS and isinstance(value, int | float) and not 0 < value < math.inf:
                raise CheckpointError(f"{path}: {name} is {value}, it must be finite and greater than 0", FETCH_HINT)
            if _is_number(value) and (name.startswith("num_") or "_size" in name) and not 0 <= value < math.inf:
                raise CheckpointError(f"{path}: {name} is {value}, it must not be negative", FETCH_HINT)
    _require_rotary(fields.get(ROPE) or {}, path)
    try:
        getattr(text, "kv_sharing_modes", None)
    except (ValueError, IndexError) as error:
        shared = f"num_kv_shared_layers is {text.num_kv_shared_layers} of {text.num_hidden_layers} layers"
        raise CheckpointError(f"{path}: {shared}: {first_line(error)}", FETCH_HINT) from error


def _require_rotary(rope: Mapping[str, Any], path: Path) -> None:
    """Raises CheckpointError: no rotary frequencies can be made of a number; names its field."""
    for kind, settings in {"": rope, **rope}.items():
        for name in ROPE_NUMBERS if isinstance(settings, Mapping) else ():
            value, greatest = settings.get(name), 1 if name == ROPE_SHARE else sys.float_info.max
            if _is_number(value) and not 0 < value <= greatest:
                field = ".".join(part for part in (ROPE, kind, name) if part)
                rule = "greater than 0 and at most 1" if name == ROPE_SHARE else "finite and greater than 0"
                raise CheckpointError(f"{path}: {field} is {value}, it must be {rule}", FETCH_HINT)


def _is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)
