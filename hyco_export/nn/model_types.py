"""Which model types can stand where in a recipe, and what to do with one that cannot.

Knows transformers' names of model types and the marks of quantised checkpoints; no weights.
"""

from transformers import PreTrainedConfig

from hyco_export.errors import CheckpointError

# text parts of the models whose last layers store K/V for an assistant; a multimodal checkpoint holds one of them
VERIFIER_TEXT_TYPES = ("gemma4_text", "gemma4_unified_text")
HEAD_SUFFIX = "_assistant"
NEXT_STEPS = (  # beginning of a model type, what to do with it
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
    hint = next(step for beginning, step in NEXT_STEPS if config.model_type.startswith(beginning))
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
