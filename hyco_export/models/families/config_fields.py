"""Which fields of a model's config are honoured, which model types can stand where in a recipe, and what is said of the
others.

A field that changes what a model computes is read, or has one of the values that the static network computes; any other
value is refused by name. So is a field that transformers' class does not know: its model, the reference of every
comparison, ignores it too.
"""

from collections.abc import Iterator, Mapping
from functools import cache

from transformers import PreTrainedConfig

from hyco_export.errors import CheckpointError
from hyco_export.models.families.gemma4_assistant import HEAD_MODEL_TYPE, HONOURED
from hyco_export.models.families.slm_family import LAYERS, ROPE, Honoured, slm_families

FIXED_FREQUENCIES = ("default", "linear", "proportional", "llama3", "yarn")  # rotary kinds that know no text's length
LAYER_FIELDS = frozenset({"head_dim", "num_key_value_heads"})  # what may differ from layer to layer
# beginnings of fields that say nothing of the computation, or are judged elsewhere
NOTES = (
    *("_", "unsloth_", "model_type", "auto_map", "quantization_config", "transformers_weights"),
    *("cache_implementation", "output_attentions"),
)
REMOVE_HINT = "remove it from config.json if it says nothing of what the model computes, else use another model"
MEANING = {  # of fields whose names do not say it
    "use_bidirectional_attention": "its attention looks ahead",
    "enable_moe_block": "it has mixture-of-experts blocks",
}


@cache
def converted() -> Mapping[str, Honoured]:
    """Fields of the models that become graphs, by transformers' model type: SLMs, a head, a head's text part."""
    found = {model_type: family.honoured for model_type, family in slm_families().items()}
    return {**found, HEAD_MODEL_TYPE: HONOURED}


def require_honoured(config: PreTrainedConfig, role: str) -> None:
    """A model that is converted asks for nothing that the static network does not compute.

    Raises:
        CheckpointError: a field has another value than those that are implemented, or is unknown; names both.
    """
    for problem, hint in not_honoured(config):
        raise CheckpointError(f"the {role} cannot run as a static graph: {problem}", hint)


def not_honoured(config: PreTrainedConfig) -> Iterator[tuple[str, str]]:
    """What a config, and its text part, asks for in vain, each with its next step; model types are others' matter."""
    text = config.get_text_config()
    for part in (config,) if text is config else (config, text):
        if part.model_type in converted():
            yield from _values_in_vain(part, converted()[part.model_type])
            yield from _parts_in_vain(part)


def _values_in_vain(config: PreTrainedConfig, honoured: Honoured) -> Iterator[tuple[str, str]]:
    for name, value in config.to_dict().items():
        if name in honoured.only:
            if value not in honoured.only[name]:
                wanted = " or ".join(map(repr, honoured.only[name]))
                meaning = f" ({MEANING[name]})" if name in MEANING else ""
                yield f"{name} is {value!r}{meaning}, only {wanted} is implemented", _next_step(config)
        elif name not in honoured.read and not name.startswith(NOTES) and value not in (None, False, {}, []):
            yield f"{name} is {value!r}, a field that transformers' {type(config).__name__} does not know", REMOVE_HINT


def _parts_in_vain(config: PreTrainedConfig) -> Iterator[tuple[str, str]]:
    """Kinds of rotary embedding, and fields that differ from layer to layer."""
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


# ---- model types by their place in a recipe

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
    """The model must be one that hands K/V to a head.

    Raises:
        CheckpointError: it is another one; the hint says what it is good for.
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
    """The head is trained towards what the verifier in full precision says.

    Raises:
        CheckpointError: the weights are quantised.
    """
    if method := quantisation_method(config):
        message = f"the verifier's weights are quantised ({method}), a capture demands BF16"
        raise CheckpointError(message, FULL_PRECISION_HINT)
