"""From transformers' head module to what is stored: its shape, norms and weights under the static network's names."""

from collections.abc import Mapping

import numpy as np
from transformers import Gemma4AssistantForCausalLM, PreTrainedConfig

from hyco_export.core.handoff import LayerType
from hyco_export.core.network.head import HeadArchitecture, HeadLayer
from hyco_export.core.network.head_file import StoredHead
from hyco_export.core.network.weights import IntegerMatrix
from hyco_export.errors import CheckpointError
from hyco_export.nn.head.unroll import head_spans
from hyco_export.nn.verifier import ATTENTION_NAMES, layer_kv_shape

MODEL_PREFIX = "model."  # transformers' name of the decoder inside the head
WEIGHT_SUFFIX = ".weight"
ACTIVATION = "gelu_pytorch_tanh"
SHORT_NAMES: dict[str, LayerType] = {name: short for short, name in ATTENTION_NAMES.items()}


def stored_name(module_name: str) -> str:
    """The static network's name of a module: `model.layers.0.mlp.up_proj` -> `layers.0.mlp.up_proj`."""
    return module_name.removeprefix(MODEL_PREFIX)


def store(head: Gemma4AssistantForCausalLM, matrices: Mapping[str, IntegerMatrix], bits: int) -> StoredHead:
    """The head with these integer matrices (by module name) and its own float norms.

    Raises:
        CheckpointError: the head has a part that the static network does not.
    """
    named = {stored_name(name): matrix for name, matrix in matrices.items()}
    return StoredHead(head_architecture(head), bits, named, norm_vectors(head))


def norm_vectors(head: Gemma4AssistantForCausalLM) -> dict[str, np.ndarray]:
    """Scales of all norms, float32 [n]."""
    return {
        stored_name(name).removesuffix(WEIGHT_SUFFIX): parameter.detach().float().cpu().numpy()
        for name, parameter in head.named_parameters()
        if parameter.ndim == 1 and name.endswith(WEIGHT_SUFFIX)
    }


def head_architecture(head: Gemma4AssistantForCausalLM) -> HeadArchitecture:
    """The head's shape.

    Raises:
        CheckpointError: the head has a part that the static network does not.
    """
    config: PreTrainedConfig = head.config
    text = config.get_text_config()
    _require_supported(text)
    layers = tuple(
        HeadLayer(
            layer_type=SHORT_NAMES[layer_type],
            heads=text.num_attention_heads,
            kv=layer_kv_shape(text, index),
            scalar=float(head.model.layers[index].layer_scalar),
        )
        for index, layer_type in enumerate(text.layer_types)
    )
    return HeadArchitecture(
        backbone=config.backbone_hidden_size,
        width=text.hidden_size,
        vocab_size=text.vocab_size,
        epsilon=text.rms_norm_eps,
        layers=layers,
        spans=head_spans(config),
        inv_freq=_rotary_frequencies(head),
    )


def _require_supported(text: PreTrainedConfig) -> None:
    rules = (
        (text.hidden_activation == ACTIVATION, f"activation {text.hidden_activation}, not {ACTIVATION}"),
        (not text.attention_bias, "biased attention projections"),
        (
            set(text.layer_types) == set(SHORT_NAMES),
            f"layer types {sorted(set(text.layer_types))}, not sliding and full",
        ),
    )
    for holds, problem in rules:
        if not holds:
            raise CheckpointError(f"the head has {problem}", "the static graph covers Gemma 4 assistants as published")


def _rotary_frequencies(head: Gemma4AssistantForCausalLM) -> dict[str, tuple[float, ...]]:
    """By layer type, [d / 2]; 0 where a pair does not rotate (transformers' `Gemma4TextRotaryEmbedding`)."""
    rotary = head.model.rotary_emb
    frequencies: dict[str, tuple[float, ...]] = {}
    for name, layer_type in SHORT_NAMES.items():
        if getattr(rotary, f"{name}_attention_scaling") != 1.0:
            raise CheckpointError(
                f"the head scales rotary tables of {name} layers", "only unscaled tables are supported"
            )
        frequencies[layer_type] = tuple(float(value) for value in getattr(rotary, f"{name}_inv_freq"))
    return frequencies
