"""Costs of single layers are divergences from the original head; the greedy order is by gain for a byte."""

import pytest
import torch

from hyco_export.models.capture import teacher_forced
from hyco_export.models.head import quantisers
from hyco_export.models.head.agreement import compare_heads
from hyco_export.models.head.quantisers import LayerGrid, nearest_on, split_matrices, split_projection
from hyco_export.models.head.sensitivity import LayerCost, by_gain_per_byte, layer_costs, prefix_sizes
from hyco_export.models.head.unroll import head_spans, response_rows, unroll
from tests.support import builders

VOCAB = 60


@pytest.fixture(scope="module")
def teacher():
    return builders.small_head(VOCAB)


@pytest.fixture(scope="module")
def sequences(teacher):
    verifier = builders.small_verifier(VOCAB)
    captures = [teacher_forced(verifier, builders.random_ids(20, VOCAB, seed), 8) for seed in range(2)]
    return [response_rows(capture, head_spans(teacher.config), 1000) for capture in captures]


def untied():
    head = builders.small_head(VOCAB)
    quantisers.untie_output_layer(head)
    return head


def mean_kl(teacher, student, matrices, sequences):
    quantisers.load_matrices(student, matrices)
    depths = compare_heads(teacher, student, sequences, 2)
    return sum(depth.kl for depth in depths) / len(depths)


def test_gains_are_those_of_the_head_with_one_layer_changed(teacher, sequences):
    student = untied()
    weights = quantisers.linear_weights(student)
    narrow = nearest_on(weights, dict.fromkeys(weights, LayerGrid(4)))
    wide = nearest_on(weights, dict.fromkeys(weights, LayerGrid(8)))
    costs = {cost.name: cost for cost in layer_costs(teacher, student, narrow, wide, sequences, 2, lambda d, t: None)}
    assert costs.keys() == weights.keys()

    base = mean_kl(teacher, student, narrow, sequences)
    one_wide = mean_kl(teacher, student, {**narrow, "pre_projection": wide["pre_projection"]}, sequences)
    assert costs["pre_projection"].kl_gain == pytest.approx(base - one_wide, abs=1e-6)
    one_narrow = mean_kl(teacher, student, {**wide, "pre_projection": narrow["pre_projection"]}, sequences)
    assert costs["pre_projection"].kl_alone == pytest.approx(one_narrow, rel=0.1)  # others at 8 bits: nearly float
    assert costs["lm_head"].extra_bytes == weights["lm_head"].numel() // 2
    assert all(10 < cost.sqnr_db < 30 for cost in costs.values())


def cost(name, gain, extra):
    return LayerCost(name, 4, 100, extra, 20.0, 0.0, gain)


def test_the_order_is_by_gain_for_a_byte_without_what_gains_nothing():
    costs = [cost("big", 2.0, 100), cost("small", 1.0, 10), cost("worse", -1.0, 10), cost("wide already", 1.0, 0)]
    assert [found.name for found in by_gain_per_byte(costs)] == ["small", "big"]


def test_prefixes_double_up_to_all():
    assert prefix_sizes(0) == []
    assert prefix_sizes(1) == [1]
    assert prefix_sizes(5) == [1, 2, 4, 5]
    assert prefix_sizes(8) == [1, 2, 4, 8]


def test_a_split_head_is_the_same_head(teacher, sequences):
    head = untied()
    split_projection(head)
    for wanted, given in zip(unroll(teacher, sequences[0], 2), unroll(head, sequences[0], 2), strict=True):
        torch.testing.assert_close(given, wanted, atol=1e-4, rtol=1e-4)
    names = set(quantisers.linear_weights(head))
    assert {"pre_projection.embedding", "pre_projection.state"} <= names and "pre_projection" not in names


def test_split_matrices_are_the_halves_of_the_whole(sequences):
    whole, halves = untied(), untied()
    split_projection(halves)
    weights = quantisers.linear_weights(whole)
    matrices = nearest_on(weights, dict.fromkeys(weights, LayerGrid(4)))
    quantisers.load_matrices(whole, matrices)
    quantisers.load_matrices(halves, split_matrices(matrices))
    for wanted, given in zip(unroll(whole, sequences[0], 2), unroll(halves, sequences[0], 2), strict=True):
        torch.testing.assert_close(given, wanted, atol=1e-4, rtol=1e-4)
