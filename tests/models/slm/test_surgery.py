"""Surgery: which layer reads whose K/V, what the output layer keeps, which factors move, what is refused."""

from pathlib import Path

import numpy as np
import pytest

from hyco_export.core.tables import PER_LAYER, TOKENS, real_rows
from hyco_export.errors import CheckpointError
from hyco_export.models.slm.packed import PackedCheckpoint
from hyco_export.models.slm.surgery import host_tables, slm_network, slm_weights
from tests.support.packed_slm import RINGS, VOCAB, plain_config, save_packed_slm, slm_config


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> PackedCheckpoint:
    return PackedCheckpoint(save_packed_slm(tmp_path_factory.mktemp("slm")))


def test_shared_layers_read_the_last_storing_layer_of_their_type(checkpoint: PackedCheckpoint) -> None:
    network = slm_network(checkpoint, RINGS)
    assert [layer.source for layer in network.layers] == [0, 1, 0, 0, 1]
    assert [layer.index for layer in network.storing] == [0, 1]
    assert [layer.dim for layer in network.layers] == [8, 16, 8, 8, 16]
    assert network.spans == {"sliding": 8, "full": None}
    assert {name: len(values) for name, values in network.inv_freq.items()} == {"sliding": 4, "full": 8}
    assert len({layer.scalar for layer in network.layers}) == 5  # each has its own


def test_values_from_keys_in_full_layers_only(tmp_path: Path) -> None:
    network = slm_network(PackedCheckpoint(save_packed_slm(tmp_path / "slm", plain_config())), RINGS)
    assert [layer.values_from_keys for layer in network.layers] == [False, True, True]
    assert [layer.stores for layer in network.layers] == [True] * 3
    assert (network.per_layer, network.soft_cap) == (0, None)


def test_the_output_layer_keeps_its_rows(checkpoint: PackedCheckpoint) -> None:
    kept = np.array([0, 5, VOCAB - 1])
    weights, whole = slm_weights(checkpoint, kept).integer_matrices(), checkpoint.matrix("lm_head").unpacked()
    assert np.array_equal(weights["lm_head"].integers, whole.integers[kept])
    assert np.array_equal(weights["lm_head"].scales, whole.scales[kept])
    down = "layers.3.mlp.down_proj"
    assert np.array_equal(weights[down].integers, checkpoint.integers(f"model.{down}"))
    assert weights[down].bits == 2


def test_the_per_layer_factor_moves_to_norm_and_table(checkpoint: PackedCheckpoint) -> None:
    vectors = slm_weights(checkpoint, np.arange(3)).vectors
    norm = checkpoint.vector("model.per_layer_projection_norm.weight")
    assert np.allclose(vectors["per_layer_projection_norm"], norm / np.sqrt(2.0))
    tables = host_tables(checkpoint)
    assert tables[TOKENS].layout.factor == pytest.approx(32**0.5)
    assert tables[PER_LAYER].layout.factor == pytest.approx(4**0.5 / 2**0.5)
    assert real_rows(tables[TOKENS].packed[:2], tables[TOKENS].scales[:2], tables[TOKENS].layout).shape == (2, 32)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"hidden_activation": "silu"}, "hidden_activation is 'silu', only 'gelu_pytorch_tanh' is implemented"),
        (
            {"use_bidirectional_attention": "vision"},
            r"use_bidirectional_attention is 'vision' \(its attention looks ahead\)",
        ),
        ({"attention_bias": True}, "attention_bias is True, only False"),
    ],
)
def test_what_the_static_network_lacks_is_named(
    checkpoint: PackedCheckpoint, fields: dict[str, object], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in fields.items():
        monkeypatch.setattr(checkpoint.config, name, value)
    with pytest.raises(CheckpointError, match=f"cannot run as a static graph: {words}"):
        slm_network(checkpoint, RINGS)


def test_rings_of_absent_layer_types_are_left_out(tmp_path: Path) -> None:
    config = slm_config("FFF", num_kv_shared_layers=0, use_double_wide_mlp=False)
    network = slm_network(PackedCheckpoint(save_packed_slm(tmp_path / "slm", config)), RINGS)
    assert network.rings == {"full": 12}
