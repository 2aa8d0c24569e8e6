"""Gemma 4: per-layer embeddings, layers that share K/V, values from keys, a scalar for each layer's result.

Verifiers are of this family too; its multi-token-prediction head is in `gemma4_assistant`.
"""

from typing import Any

import numpy as np
from transformers import Gemma4ForCausalLM, Gemma4TextConfig
from transformers.models.gemma4.modeling_gemma4 import (
    Gemma4TextDecoderLayer,
    Gemma4TextModel,
    Gemma4TextRotaryEmbedding,
    Gemma4TextScaledWordEmbedding,
)

from hyco_export.core.network.slm import SlmLayer, SlmNetwork
from hyco_export.errors import CheckpointError
from hyco_export.models.families.slm_family import (
    INERT,
    LAYERS,
    MODEL_PREFIX,
    TEXT,
    WINDOWED,
    Honoured,
    ReadVector,
    Rings,
    SlmFamily,
    Vectors,
    kv_sources,
    layer_types,
    rotary_frequencies,
    static_network,
)

ACTIVATION = "gelu_pytorch_tanh"
PER_LAYER_NORM = "per_layer_projection_norm"
PER_LAYER_SHARE = 2.0**-0.5  # `Gemma4TextModel.per_layer_input_scale`: keeps the variance of a sum of two
EXPERTS = frozenset({"num_experts", "top_k_experts", "moe_intermediate_size"})  # nothing without enable_moe_block
OWN_FIELDS = frozenset(
    {
        *("hidden_size_per_layer_input", "vocab_size_per_layer_input", "attention_k_eq_v", "num_kv_shared_layers"),
        *("use_double_wide_mlp", "final_logit_softcapping", LAYERS),
    }
)
# transformers' classes under the names that the rest of the package uses
LanguageModel = Gemma4ForCausalLM
LanguageConfig = Gemma4TextConfig
Backbone = Gemma4TextModel
DecoderLayer = Gemma4TextDecoderLayer
ScaledEmbedding = Gemma4TextScaledWordEmbedding


def network(text: Any, rings: Rings, read: ReadVector) -> SlmNetwork:
    """The static network of a Gemma 4 text config; layer scalars come from the checkpoint.

    Raises:
        CheckpointError: no layer stores K/V.
    """
    if text.num_hidden_layers <= text.num_kv_shared_layers:
        raise CheckpointError(
            f"the SLM cannot run as a static graph: num_kv_shared_layers is {text.num_kv_shared_layers} of "
            f"{text.num_hidden_layers} layers, one must store keys and values",
            "use a language model: a head reads another model's",
        )
    sources = kv_sources(text)
    layers = [
        SlmLayer(
            index=index,
            layer_type=layer_type,
            heads=text.num_attention_heads,
            kv_heads=text.per_layer_config[index].num_key_value_heads,
            dim=text.per_layer_config[index].head_dim,
            source=sources[index],
            values_from_keys=text.attention_k_eq_v and layer_type == "full",
            scalar=float(read(f"{MODEL_PREFIX}layers.{index}.layer_scalar").item()),
        )
        for index, layer_type in enumerate(layer_types(text))
    ]
    frequencies = rotary_frequencies(Gemma4TextRotaryEmbedding(text))
    return static_network(text, rings, frequencies, layers, per_layer_width(text), text.final_logit_softcapping)


def per_layer_width(text: Any) -> int:
    """0 without per-layer embeddings."""
    return text.hidden_size_per_layer_input or 0


def norms(text: Any, stored: Vectors) -> dict[str, np.ndarray]:
    """Weights as stored; the norm of projected embeddings holds their share of the sum with the per-layer ones."""
    found = dict(stored)
    if PER_LAYER_NORM in found:
        found[PER_LAYER_NORM] = found[PER_LAYER_NORM] * np.float32(PER_LAYER_SHARE)
    return found


FAMILY = SlmFamily(
    model_type="gemma4_text",
    model=Gemma4ForCausalLM,
    honoured=Honoured(
        INERT | TEXT | WINDOWED | OWN_FIELDS | EXPERTS,
        {
            "enable_moe_block": (False,),
            "attention_bias": (False,),
            "hidden_activation": (ACTIVATION,),
            "use_bidirectional_attention": (None,),
        },
    ),
    network=network,
    norms=norms,
    per_layer_width=per_layer_width,
    per_layer_share=PER_LAYER_SHARE,
)
