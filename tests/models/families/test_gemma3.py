"""Gemma 3's network, and norms as factors with the scale of attention scores in those of the queries."""

import numpy as np
import pytest
import torch
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm

from hyco_export.models.families import gemma3
from tests.support.float_slm import gemma3_config
from tests.support.packed_slm import RINGS, WINDOW


def test_the_network_has_both_rotary_tables_and_reads_no_tensor() -> None:
    def read(name: str) -> np.ndarray:
        raise AssertionError(f"{name} is read")

    config = gemma3_config("SSFSF")
    network = gemma3.network(config, RINGS, read)
    assert [layer.layer_type for layer in network.layers] == ["sliding", "sliding", "full", "sliding", "full"]
    assert network.spans == {"sliding": WINDOW, "full": None}
    plain = 1e4 ** (-np.arange(0, 8, 2) / 8)
    np.testing.assert_allclose(network.inv_freq["sliding"], plain, rtol=1e-6)
    np.testing.assert_allclose(network.inv_freq["full"], 1e6 ** (-np.arange(0, 8, 2) / 8) / 8.0, rtol=1e-6)
    assert not any(layer.values_normed for layer in network.layers)


def test_norms_are_transformers_and_scores_have_their_scale() -> None:
    config = gemma3_config("SF")
    generator = np.random.default_rng(0)
    names = {"norm": 32, "layers.0.self_attn.q_norm": 8, "layers.0.self_attn.k_norm": 8}
    stored = {name: generator.normal(size=size).astype(np.float32) for name, size in names.items()}
    factors = gemma3.norms(config, stored)
    x = torch.from_numpy(generator.normal(size=(5, 32)).astype(np.float32))
    norm = Gemma3RMSNorm(32, eps=0.0)
    norm.weight.data = torch.from_numpy(stored["norm"])
    plain = x / x.square().mean(-1, keepdim=True).sqrt() * torch.from_numpy(factors["norm"])
    torch.testing.assert_close(plain, norm(x).detach(), atol=1e-5, rtol=1e-5)
    query, key = "layers.0.self_attn.q_norm", "layers.0.self_attn.k_norm"
    product = factors[query] * factors[key]  # of a pair of channels that rotation does not mix with others
    wanted = (1 + stored[query]) * (1 + stored[key]) * config.query_pre_attn_scalar**-0.5
    np.testing.assert_allclose(product, wanted, rtol=1e-5)
    assert np.maximum(np.abs(factors[key][:4]), np.abs(factors[key][4:])) == pytest.approx(np.ones(4))
