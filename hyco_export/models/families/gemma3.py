"""Gemma 3: norms stored less 1, norms of queries and keys, sliding and full layers with rotary tables of their own."""

from typing import Any

import numpy as np
from transformers import Gemma3ForCausalLM, Gemma3TextConfig
from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding

from hyco_export.core.network.slm import SlmNetwork
from hyco_export.models.families.slm_family import (
    INERT,
    TEXT,
    WINDOWED,
    Honoured,
    ReadVector,
    Rings,
    SlmFamily,
    Vectors,
    plain_layers,
    rotary_frequencies,
    scaled_query_norms,
    static_network,
)

ACTIVATION = "gelu_pytorch_tanh"
Gemma3Model = Gemma3ForCausalLM
Gemma3Config = Gemma3TextConfig


def network(text: Any, rings: Rings, read: ReadVector) -> SlmNetwork:
    """The static network of a Gemma 3 text config."""
    frequencies = rotary_frequencies(Gemma3RotaryEmbedding(text))
    return static_network(text, rings, frequencies, plain_layers(text), soft_cap=text.final_logit_softcapping)


def norms(text: Any, stored: Vectors) -> dict[str, np.ndarray]:
    """Weights as factors; those of queries hold the factor of attention scores."""
    factors = {name: np.float32(1.0) + weight for name, weight in stored.items()}
    return scaled_query_norms(factors, text.query_pre_attn_scalar**-0.5)


FAMILY = SlmFamily(
    model_type="gemma3_text",
    model=Gemma3ForCausalLM,
    honoured=Honoured(
        INERT | TEXT | WINDOWED | {"final_logit_softcapping", "query_pre_attn_scalar"},
        {
            "attention_bias": (False,),
            "hidden_activation": (ACTIVATION,),
            "use_bidirectional_attention": (False, None),
            "attn_logit_softcapping": (None,),
        },
    ),
    network=network,
    norms=norms,
)
