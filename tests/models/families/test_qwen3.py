"""Qwen 3's network: layer types of its config, and the scale of attention scores in the norms of the queries."""

import numpy as np

from hyco_export.models.families import qwen3
from tests.support.float_slm import qwen3_config
from tests.support.packed_slm import RINGS, WINDOW

SLIDING = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": WINDOW}


def no_tensor(name: str) -> np.ndarray:
    raise AssertionError(f"{name} is read")


def test_sliding_layers_share_the_rotary_table_of_the_others() -> None:
    network = qwen3.network(qwen3_config(use_sliding_window=True, **SLIDING), RINGS, no_tensor)
    assert [layer.layer_type for layer in network.layers] == ["sliding", "full"] * 2
    assert network.spans == {"sliding": WINDOW, "full": None}
    assert network.inv_freq["sliding"] == network.inv_freq["full"]
    assert network.query_key_norms and network.query_scale == 1.0 and not network.post_norms


def test_scores_have_their_scale_and_keys_an_even_size() -> None:
    config = qwen3_config()
    generator = np.random.default_rng(0)
    query, key = "layers.0.self_attn.q_norm", "layers.0.self_attn.k_norm"
    stored = {name: generator.uniform(0.5, 2.0, config.head_dim).astype(np.float32) for name in (query, key)}
    stored[key][1] = 40.0  # an outlier, which would take the 8-bit ring's resolution
    factors = qwen3.norms(config, stored)
    np.testing.assert_allclose(
        factors[query] * factors[key], stored[query] * stored[key] * config.head_dim**-0.5, rtol=1e-5
    )
    assert np.abs(factors[key]).max() <= 1.0 + 1e-6
