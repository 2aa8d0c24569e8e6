"""Grids are chosen per channel, trained values are exactly the stored ones, and nothing but the weights moves."""

import subprocess
import sys

import numpy as np
import pytest
import torch

from hyco_export.models import weight_rounding
from hyco_export.models.head import quantisers
from hyco_export.models.head.quantisers import LayerGrid, searched_on
from tests.support import builders

VOCAB = 60
RATIOS = np.linspace(1.0, 0.6, 41)


@pytest.fixture
def head():
    head = builders.small_head(VOCAB)
    quantisers.untie_output_layer(head)
    return head


def error(weight, scales, bits):
    return (weight_rounding.quantise(weight, scales, bits) * scales[:, None] - weight).square().sum(dim=1)


def test_every_linear_layer_is_found(head):
    names = [name for name, _ in quantisers.linear_layers(head)]
    assert len(names) == 3 * 5 + 3  # q, o, gate, up, down a layer; both projections and the output layer
    assert {"lm_head", "pre_projection", "post_projection", "model.layers.2.mlp.down_proj"} <= set(names)


def test_untying_keeps_the_values_and_cuts_the_tie(head):
    assert torch.equal(head.lm_head.weight, head.model.embed_tokens.weight)
    assert head.lm_head.weight is not head.model.embed_tokens.weight


def test_rounding_to_nearest_puts_the_largest_weight_on_the_last_integer():
    weight = torch.tensor([[0.7, -0.35, 0.1], [-1.4, 0.2, 0.0], [0.0, 0.0, 0.0]])
    scales = weight_rounding.nearest_scales(weight, 4)
    torch.testing.assert_close(scales[:2], torch.tensor([0.1, 0.2]))
    integers = weight_rounding.integer_matrix(weight, scales, 4).integers
    np.testing.assert_array_equal(integers, [[7, -4, 1], [-7, 1, 0], [0, 0, 0]])  # -3.5 rounds to even


def test_the_search_finds_the_best_ratio_of_each_channel():
    torch.manual_seed(0)
    weight = torch.randn(8, 200)
    weight[3, 0] = 12.0  # one outlier: clipping pays
    found = weight_rounding.searched_scales(weight, 4, RATIOS)
    by_ratio = torch.stack([error(weight, weight_rounding.clipped_scales(weight, 4, float(r)), 4) for r in RATIOS])
    torch.testing.assert_close(error(weight, found, 4), by_ratio.min(dim=0).values)
    assert found[3] < weight_rounding.nearest_scales(weight, 4)[3]


@pytest.mark.parametrize("block", [None, 8])
def test_the_fake_quantised_head_computes_with_the_stored_integers(head, block):
    weights = quantisers.linear_weights(head)
    grids = dict.fromkeys(weights, LayerGrid(4, block)) | {"lm_head": LayerGrid(8)}
    quantisers.attach(head, searched_on(weights, grids, RATIOS))
    x = torch.randn(5, 2 * builders.HIDDEN, generator=torch.Generator().manual_seed(2))
    while_training = head.pre_projection(x).detach()

    matrices = quantisers.trained_matrices(head)
    quantisers.detach(head)
    assert torch.equal(head.pre_projection.weight, weights["pre_projection"])
    quantisers.load_matrices(head, matrices)

    torch.testing.assert_close(head.pre_projection(x), while_training, atol=1e-6, rtol=1e-6)
    for name, matrix in matrices.items():
        assert matrix.integers.dtype == np.int8
        low, high = (-128, 127) if name == "lm_head" else (-8, 7)
        assert low <= matrix.integers.min() < matrix.integers.max() <= high, name
        assert matrix.block == (matrix.integers.shape[1] if block is None or name == "lm_head" else block), name


def test_only_weights_are_trainable_and_the_estimator_is_straight_through(head):
    weights = quantisers.linear_weights(head)
    clipped = {name: weight_rounding.clipped_scales(w, 4, 0.6) for name, w in weights.items()}
    quantisers.attach(head, {name: weight_rounding.integer_matrix(w, clipped[name], 4) for name, w in weights.items()})
    trainable = {name for name, parameter in head.named_parameters() if parameter.requires_grad}
    assert trainable == {f"{name}.parametrizations.weight.original" for name in weights}

    head.post_projection.weight.sum().backward()
    gradient = head.post_projection.parametrizations.weight.original.grad
    weight, largest = weights["post_projection"], weights["post_projection"].abs().amax(dim=1, keepdim=True)
    assert torch.all(gradient[weight.abs() < 0.59 * largest] == 1.0)  # inside the grid
    assert torch.all(gradient[weight >= 0.7 * largest] == 0.0)  # clipped


def test_the_import_of_aimet_keeps_nothing_of_its_importer():
    script = """
import gc, weakref
class Model: pass
def stage():
    model = Model()
    import hyco_export.models.head.quantisers
    return weakref.ref(model)
model = stage()
gc.collect()
assert model() is None
"""
    subprocess.run([sys.executable, "-c", script], check=True)
