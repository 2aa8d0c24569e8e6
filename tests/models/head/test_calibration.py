"""Ranges come from the captures as stated: percentiles for the hand-off, extremes inside."""

import numpy as np
import pytest
import torch

from hyco_export.core.encodings import encoding_from_range
from hyco_export.core.network.head import HeadNetwork, logits_name
from hyco_export.core.network.quantisation import handoff_encodings, head_encodings
from hyco_export.core.network.weights import IntegerTable
from hyco_export.models.capture import load_capture, save_capture, teacher_forced
from hyco_export.models.head import quantisers
from hyco_export.models.head.calibration import (
    ROOTS_PER_PASS,
    activation_ranges,
    captured_ranges,
    clipped_shares,
    recorded,
    response_feeds,
    spread_roots,
)
from hyco_export.models.head.static_pass import FloatHead
from hyco_export.models.head.stored import store
from tests.models.head.nearest import nearest_matrices
from tests.support import builders

VOCAB, WINDOW, STEPS = 60, 16, 2


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    folder = tmp_path_factory.mktemp("captures")
    verifier = builders.small_verifier(VOCAB)
    for seed in range(2):
        capture = teacher_forced(verifier, builders.random_ids(32, VOCAB, seed), 8)
        save_capture(folder / f"{seed}.safetensors", capture)
    return sorted(folder.iterdir())


@pytest.fixture(scope="module")
def head():
    module = builders.small_head(VOCAB)
    quantisers.untie_output_layer(module)
    weights = quantisers.linear_weights(module)
    stored = store(module, nearest_matrices(weights, 4), 4)
    rng = np.random.default_rng(0)
    table = IntegerTable(rng.integers(0, 255, (VOCAB, builders.HIDDEN), np.uint8), np.full(VOCAB, 0.01, np.float32))
    network = HeadNetwork(stored.architecture, STEPS, 1, WINDOW, "post", 1e-6)
    return FloatHead(network, stored.device_weights(np.arange(VOCAB), table, None))


def test_hand_off_ranges_are_percentiles_of_all_captures(paths):
    found = captured_ranges(paths, 99.0)
    assert set(found) == {"e", "h", "k.sliding", "v.sliding", "k.full", "v.full"}
    for name, (low, high) in found.items():
        values = np.concatenate([recorded(load_capture(path))[name].ravel() for path in paths])
        assert (low, high) == pytest.approx(np.percentile(values, (1.0, 99.0)))


def test_clipping_is_counted_beyond_half_a_step(paths):
    values = np.concatenate([recorded(load_capture(path))["e"].ravel() for path in paths])
    grids = {name: encoding_from_range(-9.0, 9.0, "uint8") for name in captured_ranges(paths, 100.0)}
    assert set(clipped_shares(paths, grids).values()) == {0.0}
    tight = encoding_from_range(-3.0, 3.0, "uint8")
    expected = np.mean((values < -3.0 - tight.scale / 2) | (values > 3.0 + tight.scale / 2))
    assert 0.0 < expected < 0.5
    assert clipped_shares(paths, {**grids, "e": tight})["e"] == pytest.approx(expected, abs=5e-3)


def test_activations_are_calibrated_as_the_device_runs_them(paths, head):
    grids = handoff_encodings(captured_ranges(paths, 99.99))
    seen = []
    ranges = activation_ranges(head, paths, grids, -100.0, seen.append)
    assert seen == [1, 2]

    values: dict[str, list[torch.Tensor]] = {}
    for path in paths:
        for feeds in response_feeds(head, load_capture(path), grids, -100.0):
            assert len(feeds["e"]) == ROOTS_PER_PASS
            head.draft(feeds, lambda name, tensor: values.setdefault(name, []).append(tensor.flatten()))
    assert set(ranges) == set(values)
    for name in (logits_name(2), "step1.state"):
        seen_values = torch.cat(values[name])
        assert ranges[name] == (seen_values.min().item(), seen_values.max().item())

    encodings = head_encodings(head.network, ranges, grids, -100.0)
    assert encodings[logits_name(1)].dequantize(np.array([65535]))[0] > ranges[logits_name(1)][1]
    joined = encodings["step2.joined"].dequantize(np.array([0, 65535]))
    for part in ("embedded", "carried"):
        low, high = ranges[f"step2.{part}"]
        assert joined[0] <= low + 1e-3
        assert joined[1] >= high - 1e-3


def test_compared_roots_are_spread_over_the_answer(paths):
    capture = load_capture(paths[0])
    assert spread_roots(capture, 3).tolist() == [capture.roots[0], 18, capture.roots[-1]]
    assert spread_roots(capture, 1000).tolist() == list(capture.roots)
