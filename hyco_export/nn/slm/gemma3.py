"""Gemma 3 text models as the static SLM: their shape, and their norms as the network applies them.

Follows transformers' `Gemma3ForCausalLM`: every layer stores K/V, values have no norm, norms multiply by 1 + weight,
and scores by query_pre_attn_scalar^-0.5, which moves into the weight of the queries' norm (rotation keeps lengths).
So do the weights of the keys' norm: a few of them are 20 times the others, and keys have 8 bits, queries 16.
Knows the config and the norms; no other weights.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding

from hyco_export.core.network.slm import SlmLayer, SlmNetwork
from hyco_export.nn.config_fields import require_honoured
from hyco_export.nn.slm.layer_types import SHORT_NAMES, rotary_frequencies

GEMMA3 = "gemma3_text"  # transformers' model type
QUERY_NORM, KEY_NORM = ".q_norm", ".k_norm"


def gemma3_network(text: Any, rings: dict[str, int]) -> SlmNetwork:
    """The static network of a Gemma 3 text config over rings of these capacities (by `sliding` and `full`).

    Raises:
        CheckpointError: the model has a part that the static network does not.
    """
    require_honoured(text, "SLM")
    types = [SHORT_NAMES[layer_type] for layer_type in text.layer_types]
    spans = {"sliding": text.sliding_window, "full": None}
    return SlmNetwork(
        hidden=text.hidden_size,
        per_layer=0,
        epsilon=text.rms_norm_eps,
        soft_cap=text.final_logit_softcapping,
        rings={layer_type: rings[layer_type] for layer_type in sorted(set(types))},
        spans={layer_type: spans[layer_type] for layer_type in sorted(set(types))},
        inv_freq=rotary_frequencies(Gemma3RotaryEmbedding(text)),
        layers=tuple(
            SlmLayer(
                index=index,
                layer_type=layer_type,
                heads=text.num_attention_heads,
                kv_heads=text.num_key_value_heads,
                dim=text.head_dim,
                source=index,
                values_from_keys=False,
                scalar=1.0,
                values_normed=False,
            )
            for index, layer_type in enumerate(types)
        ),
    )


def gemma3_vectors(text: Any, vectors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Norm weights [n] by name as factors; the same scores from keys of even size."""
    factors = {name: np.float32(1.0) + weight for name, weight in vectors.items()}
    scale = np.float32(text.query_pre_attn_scalar**-0.5)
    for query in [name for name in factors if name.endswith(QUERY_NORM)]:
        key = query.removesuffix(QUERY_NORM) + KEY_NORM
        size = _pair_sizes(factors[key])
        factors[query], factors[key] = factors[query] * size * scale, factors[key] / size
    return factors


def _pair_sizes(weight: np.ndarray) -> np.ndarray:
    """[d] of weight [d]: the greater magnitude of each two that rotation mixes, i and i + d/2; 1 where both are 0."""
    half = len(weight) // 2
    size = np.maximum(np.abs(weight[:half]), np.abs(weight[half:]))
    return np.tile(np.where(size > 0, size, np.float32(1.0)), 2)
