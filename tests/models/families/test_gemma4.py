"""Gemma 4's network: shared K/V, values from keys, scalars of layers, and the share of per-layer embeddings."""

import numpy as np
import pytest

from hyco_export.errors import CheckpointError
from hyco_export.models.families import gemma4
from tests.support.builders import text_config
from tests.support.packed_slm import RINGS


def scalars(name: str) -> np.ndarray:
    """Layer n has the scalar 1 + n / 4."""
    assert name.endswith(".layer_scalar"), name
    return np.array([1 + int(name.split(".")[2]) / 4], np.float32)


def test_layers_read_the_last_kv_of_their_type() -> None:
    config = text_config("SFSFSF", 60, 32, num_kv_shared_layers=2, attention_k_eq_v=True)
    layers = gemma4.network(config, RINGS, scalars).layers
    assert [layer.source for layer in layers] == [0, 1, 2, 3, 2, 3]
    assert [layer.values_from_keys for layer in layers] == [False, True] * 3
    assert [layer.scalar for layer in layers] == [1.0, 1.25, 1.5, 1.75, 2.0, 2.25]
    assert [(layer.kv_heads, layer.dim) for layer in layers[:2]] == [(2, 8), (1, 16)]


def test_a_model_without_kv_of_its_own_is_refused() -> None:
    config = text_config("SF", 60, 32)
    config.num_kv_shared_layers = 2
    with pytest.raises(CheckpointError, match="num_kv_shared_layers is 2 of 2 layers, one must store keys and values"):
        gemma4.network(config, RINGS, scalars)


def test_projected_embeddings_have_half_of_the_sums_variance() -> None:
    stored = {"norm": np.ones(4, np.float32), "per_layer_projection_norm": np.full(4, 3.0, np.float32)}
    found = gemma4.norms(text_config("SF", 60, 32), stored)
    np.testing.assert_allclose(found["per_layer_projection_norm"] ** 2, 9 / 2, rtol=1e-6)
    np.testing.assert_array_equal(found["norm"], stored["norm"])
    assert gemma4.FAMILY.per_layer_share**2 == pytest.approx(0.5)
    assert gemma4.per_layer_width(text_config("SF", 60, 32)) == 0
    assert gemma4.per_layer_width(text_config("SF", 60, 32, hidden_size_per_layer_input=4)) == 4
