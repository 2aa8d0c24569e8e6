"""What Gemma 3 and Gemma 4 text models, and heads, name alike: layer types and their rotary frequencies."""

from typing import Any

from hyco_export.errors import CheckpointError
from hyco_export.nn.verifier import ATTENTION_NAMES

LONG_NAMES: dict[str, str] = dict(ATTENTION_NAMES.items())  # our layer types -> transformers'
SHORT_NAMES = {name: short for short, name in LONG_NAMES.items()}


def rotary_frequencies(rotary: Any) -> dict[str, tuple[float, ...]]:
    """[d/2] by layer type, from transformers' own rotary embedding of the model, whatever kind each type has.

    Raises:
        CheckpointError: cos and sin are multiplied by a factor, which the static network does not do.
    """
    frequencies = {}
    for layer_type in rotary.layer_types:
        factor = getattr(rotary, f"{layer_type}_attention_scaling")
        if factor != 1.0:
            raise CheckpointError(
                f"rope_parameters of {layer_type} multiply cos and sin by {factor}, only 1 is implemented",
                "use a model whose rotary tables are not scaled",
            )
        frequencies[SHORT_NAMES[layer_type]] = tuple(getattr(rotary, f"{layer_type}_inv_freq").double().tolist())
    return frequencies
