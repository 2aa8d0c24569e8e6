"""Llama's network, and its norms, which are stored under other names."""

import numpy as np
from transformers import LlamaConfig

from hyco_export.models.families import llama
from tests.support.float_slm import llama_config
from tests.support.packed_slm import RINGS

ROPE = {"rope_type": "default", "rope_theta": 1e4}
NAMES = {  # stored, and in the network
    "norm": "norm",
    "layers.3.input_layernorm": "layers.3.input_layernorm",
    "layers.3.post_attention_layernorm": "layers.3.pre_feedforward_layernorm",
}


def no_tensor(name: str) -> np.ndarray:
    raise AssertionError(f"{name} is read")


def test_all_layers_have_full_attention_and_one_rotary_table() -> None:
    config = llama_config()
    network = llama.network(config, RINGS, no_tensor)
    assert len(network.layers) == config.num_hidden_layers
    assert {layer.layer_type for layer in network.layers} == {"full"}
    assert [layer.source for layer in network.layers] == list(range(len(network.layers)))
    assert not network.query_key_norms and not network.post_norms and network.soft_cap is None
    assert network.query_scale == config.head_dim**-0.5
    plain = llama.network(LlamaConfig.from_dict({**config.to_dict(), "rope_parameters": ROPE}), RINGS, no_tensor)
    np.testing.assert_allclose(plain.inv_freq["full"], 1e4 ** (-np.arange(0, 8, 2) / 8), rtol=1e-6)


def test_norms_keep_their_values() -> None:
    stored = {name: np.array([index + 0.5], np.float32) for index, name in enumerate(NAMES)}
    found = llama.norms(llama_config(), stored)
    assert list(found) == list(NAMES.values())
    for stored_name, name in NAMES.items():
        np.testing.assert_array_equal(found[name], stored[stored_name])
