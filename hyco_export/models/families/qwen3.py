"""Qwen 3 (dense): a norm before each block and none after, SiLU, norms of queries and keys, one rotary table."""

from typing import Any

import numpy as np
from transformers import Qwen3ForCausalLM
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

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
    common_frequencies,
    layer_types,
    plain_layers,
    pre_norms_only,
    scaled_query_norms,
    static_network,
)


def network(text: Any, rings: Rings, read: ReadVector) -> SlmNetwork:
    """The static network of a Qwen 3 config."""
    frequencies = common_frequencies(Qwen3RotaryEmbedding(text), layer_types(text))
    return static_network(text, rings, frequencies, plain_layers(text), activation="silu", post_norms=False)


def norms(text: Any, stored: Vectors) -> dict[str, np.ndarray]:
    """Those of queries hold the factor of attention scores."""
    return scaled_query_norms(pre_norms_only(stored), text.head_dim**-0.5)


FAMILY = SlmFamily(
    model_type="qwen3",
    model=Qwen3ForCausalLM,
    honoured=Honoured(
        INERT | TEXT | WINDOWED | {"use_sliding_window", "max_window_layers"},  # both only decide the layer types
        {"attention_bias": (False,), "hidden_act": ("silu",)},
    ),
    network=network,
    norms=norms,
)
