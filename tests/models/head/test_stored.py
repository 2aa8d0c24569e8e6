"""Heads that no static graph covers are refused; what is stored has the static network's names and the head's shape."""

import numpy as np
import pytest

from hyco_export.errors import CheckpointError
from hyco_export.models.head.quantisers import LayerGrid, linear_weights, nearest_on
from hyco_export.models.head.stored import head_architecture, norm_vectors, store, stored_name
from tests.support import builders


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hidden_activation": "silu"}, "hidden_activation is 'silu', only 'gelu_pytorch_tanh' is implemented"),
        ({"attention_bias": True}, "attention_bias is True, only False is implemented"),
    ],
)
def test_a_head_that_no_static_graph_covers_is_refused(change, words):
    with pytest.raises(CheckpointError, match=words):
        head_architecture(builders.small_head(60, **change))


def test_stored_names_drop_the_decoder_prefix():
    assert stored_name("model.layers.0.mlp.up_proj") == "layers.0.mlp.up_proj"
    assert stored_name("lm_head") == "lm_head"
    names = set(norm_vectors(builders.small_head(60)))
    assert {"norm", "layers.2.self_attn.q_norm", "layers.0.input_layernorm"} <= names
    assert len(names) == 3 * 5 + 1


def test_the_shape_is_that_of_the_config() -> None:
    head = builders.small_head(60)
    shape = head_architecture(head)
    text = head.config.text_config
    assert (shape.backbone, shape.width, shape.vocab_size) == (builders.HIDDEN, builders.HEAD_WIDTH, 60)
    assert [layer.layer_type for layer in shape.layers] == ["sliding", "sliding", "full"]
    assert [(layer.kv.heads, layer.kv.dim) for layer in shape.layers] == [(2, 8), (2, 8), (1, 16)]
    assert [layer.scalar for layer in shape.layers] == [float(layer.layer_scalar) for layer in head.model.layers]
    assert shape.spans == {"sliding": text.sliding_window + 2, "full": None}
    assert [len(shape.inv_freq[kind]) for kind in ("sliding", "full")] == [4, 8]


def test_matrices_and_norms_are_stored_under_the_networks_names() -> None:
    head = builders.small_head(60)
    weights = linear_weights(head)
    matrices = nearest_on(weights, dict.fromkeys(weights, LayerGrid(4)))
    stored = store(head, matrices, 4)
    assert stored.bits == 4 and set(stored.matrices) == {stored_name(name) for name in matrices}
    assert not any(name.startswith("model.") for name in (*stored.matrices, *stored.vectors))
    np.testing.assert_array_equal(stored.vectors["norm"], head.model.norm.weight.detach().numpy())
