"""Llama 2 and 3, and what is published in their layout: a norm before each block and none after, SiLU, no norms of
queries and keys."""

from typing import Any

import numpy as np
from transformers import LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from hyco_export.core.network.slm import SlmNetwork
from hyco_export.models.families.slm_family import (
    INERT,
    TEXT,
    Honoured,
    ReadVector,
    Rings,
    SlmFamily,
    Vectors,
    common_frequencies,
    plain_layers,
    pre_norms_only,
    static_network,
)


def network(text: Any, rings: Rings, read: ReadVector) -> SlmNetwork:
    """The static network of a Llama config; the factor of attention scores is a scale of the queries."""
    return static_network(
        text,
        rings,
        common_frequencies(LlamaRotaryEmbedding(text), ["full"]),
        plain_layers(text),
        activation="silu",
        query_key_norms=False,
        query_scale=text.head_dim**-0.5,
        post_norms=False,
    )


def norms(text: Any, stored: Vectors) -> dict[str, np.ndarray]:
    """Weights as stored, under the network's names."""
    return pre_norms_only(stored)


FAMILY = SlmFamily(
    model_type="llama",
    model=LlamaForCausalLM,
    honoured=Honoured(
        INERT | TEXT | {"pretraining_tp"},  # of how a published model was trained; transformers does not read it
        {"attention_bias": (False,), "mlp_bias": (False,), "hidden_act": ("silu",)},
    ),
    network=network,
    norms=norms,
)
