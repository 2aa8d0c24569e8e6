"""The static head in float equals transformers' module with the same 4-bit weights; its integer graph follows it."""

import numpy as np
import pytest
import torch

from hyco_export.core.device_spec import to_integers
from hyco_export.core.network.head import HeadNetwork, build
from hyco_export.core.network.host import draft_feeds, on_grid, shared_positions
from hyco_export.core.network.quantisation import handoff_encodings, head_encodings
from hyco_export.core.network.weights import IntegerTable
from hyco_export.core.ring import slot_positions
from hyco_export.graph.lint import lint
from hyco_export.graph.parity import ReferenceSession
from hyco_export.graph.qdq_ops import QdqOps
from hyco_export.models.capture import teacher_forced
from hyco_export.models.embedding_table import quantize_rows
from hyco_export.models.head import quantisers
from hyco_export.models.head.calibration import recorded
from hyco_export.models.head.static_pass import FloatHead, TorchHeadSession
from hyco_export.models.head.stored import store
from hyco_export.models.head.unroll import final_norm, head_step, response_rows
from hyco_export.models.torch_ops import RangeObserver
from tests.models.head.nearest import nearest_matrices
from tests.support import builders

VOCAB, LENGTH, ANSWER_START = 60, 40, 12
KEPT = np.arange(2, VOCAB, 2, dtype=np.int32)
STEPS, RUNNER_UPS, WINDOW, MASK = 4, 2, 16, -100.0


@pytest.fixture(scope="module")
def verifier():
    return builders.small_verifier(VOCAB)


@pytest.fixture(scope="module")
def quantised():
    """transformers' module with the real values of 4-bit weights, and the same weights as stored."""
    head = builders.small_head(VOCAB)
    quantisers.untie_output_layer(head)
    weights = quantisers.linear_weights(head)
    matrices = nearest_matrices(weights, 4)
    quantisers.load_matrices(head, matrices)
    return head, store(head, matrices, 4)


@pytest.fixture(scope="module")
def table(verifier):
    rows = quantize_rows(verifier.get_input_embeddings()(torch.from_numpy(KEPT)).numpy())
    return IntegerTable((rows.integers.astype(np.int16) + 128).astype(np.uint8), rows.scale)


def device_head(quantised, table, verifier, hidden_norm="post"):
    _, stored = quantised
    norm = final_norm(verifier)
    network = HeadNetwork(stored.architecture, STEPS, RUNNER_UPS, WINDOW, hidden_norm, norm.epsilon)
    weights = stored.device_weights(KEPT, table, norm.weight.numpy() if hidden_norm == "pre" else None)
    return FloatHead(network, weights)


def capture_of(verifier, hidden_norm="post"):
    return teacher_forced(verifier, builders.random_ids(LENGTH, VOCAB), ANSWER_START, hidden_norm)


def transformers_draft(head, capture, table):
    """Chain and runner-ups of every response root, step by step through transformers' module: kept rows [K or S, R]."""
    rows = response_rows(capture, store(head, {}, 4).architecture.spans, WINDOW)
    embedding, state = rows.embeddings, rows.states
    chain, seconds = [], []
    for step in range(STEPS):
        with torch.no_grad():
            logits, state = head_step(head, embedding, state, rows)
        ranked = logits[:, torch.from_numpy(KEPT).long()].topk(2).indices.numpy()
        chain.append(ranked[:, 0])
        if step < RUNNER_UPS:
            seconds.append(ranked[:, 1])
        embedding = torch.from_numpy(table.real(ranked[:, 0]))
    return np.stack(chain), np.stack(seconds)


def test_free_running_steps_equal_transformers(verifier, quantised, table):
    head, _ = quantised
    capture = capture_of(verifier)
    device = device_head(quantised, table, verifier)
    roots = np.array(capture.roots)
    feeds = draft_feeds(device.network, recorded(capture), roots, shared_positions(roots, WINDOW), MASK)

    drafted = device.draft(feeds)

    chain, seconds = transformers_draft(head, capture, table)
    np.testing.assert_array_equal(drafted["chain"], chain)
    np.testing.assert_array_equal(drafted["runner_up"], seconds)
    assert len(np.unique(chain)) > STEPS  # the drafts differ: equality means something


@pytest.mark.parametrize("root", [ANSWER_START, WINDOW, WINDOW + 1, LENGTH - 2])
def test_a_ring_drafts_like_a_shared_window(verifier, quantised, table, root):
    """Before, at and after the ring wraps, its slot order changes nothing."""
    device = device_head(quantised, table, verifier)
    values = recorded(capture_of(verifier))
    roots = np.array([root])
    shared = draft_feeds(device.network, values, roots, shared_positions(roots, WINDOW), MASK)
    ring = draft_feeds(device.network, values, roots, slot_positions(root, WINDOW), MASK)

    np.testing.assert_array_equal(device.draft(ring)["chain"], device.draft(shared)["chain"])
    assert (ring["mask.full"] == 0).sum() == min(root, WINDOW)
    assert (ring["mask.sliding"] == 0).sum() == min(root, builders.SLIDING_WINDOW + 1)


def test_a_head_handed_states_from_before_the_norm_drafts_the_same(verifier, quantised, table):
    drafted = []
    for side in ("post", "pre"):
        device = device_head(quantised, table, verifier, side)
        roots = np.array(capture_of(verifier).roots)
        values = recorded(capture_of(verifier, side))
        drafted.append(device.draft(draft_feeds(device.network, values, roots, shared_positions(roots, WINDOW), MASK)))
    np.testing.assert_array_equal(drafted[0]["chain"], drafted[1]["chain"])


@pytest.mark.parametrize("side", ["post", "pre"])
def test_the_integer_graph_drafts_like_its_float_weights(verifier, quantised, table, side):
    device = device_head(quantised, table, verifier, side)
    capture = capture_of(verifier, side)
    values = recorded(capture)
    grids = handoff_encodings({name: (float(v.min()), float(v.max())) for name, v in values.items()})
    roots = np.array(capture.roots)
    seen = RangeObserver(100.0, 1)
    on_device = draft_feeds(device.network, on_grid(values, grids), roots, shared_positions(roots, WINDOW), MASK)
    device.draft(on_device, seen)
    ops = QdqOps("head", device.weights, head_encodings(device.network, seen.ranges(), grids, MASK))
    build(ops, device.network)

    assert lint(ops.model()) == []
    integer = ReferenceSession(ops.model().SerializeToString())
    floating = TorchHeadSession(device, ops.spec())
    same = []
    for root in roots:
        real = draft_feeds(device.network, values, np.array([root]), slot_positions(root, WINDOW), MASK)
        feeds = to_integers(ops.spec().inputs, real)
        wanted, given = floating.run(feeds), integer.run(feeds)
        assert wanted["chain"].shape == (STEPS,)
        assert wanted["runner_up"].shape == (RUNNER_UPS,)
        same.append(wanted["chain"] == given["chain"])
    assert np.mean(same) >= 0.97


def test_inputs_and_outputs_are_those_of_the_device(verifier, quantised, table):
    device = device_head(quantised, table, verifier)
    capture = capture_of(verifier)
    roots = np.array(capture.roots)
    seen = RangeObserver(100.0, 1)
    values = recorded(capture)
    device.draft(draft_feeds(device.network, values, roots, shared_positions(roots, WINDOW), MASK), seen)
    grids = handoff_encodings({name: (float(v.min()), float(v.max())) for name, v in values.items()})
    ops = QdqOps("head", device.weights, head_encodings(device.network, seen.ranges(), grids, MASK))
    build(ops, device.network)

    spec = ops.spec()

    assert {t.name: (t.dtype, t.shape) for t in spec.inputs} == {
        "e": ("uint8", (1, 16)),
        "h": ("uint8", (1, 16)),
        "cos.sliding": ("uint16", (1, 8)),
        "sin.sliding": ("uint16", (1, 8)),
        "k.sliding": ("uint8", (2, WINDOW, 8)),
        "v.sliding": ("uint8", (2, WINDOW, 8)),
        "mask.sliding": ("uint16", (1, WINDOW)),
        "cos.full": ("uint16", (1, 16)),
        "sin.full": ("uint16", (1, 16)),
        "k.full": ("uint8", (1, WINDOW, 16)),
        "v.full": ("uint8", (1, WINDOW, 16)),
        "mask.full": ("uint16", (1, WINDOW)),
    }
    assert [(t.name, t.dtype, t.shape) for t in spec.outputs] == [
        ("chain", "int32", (4,)),
        ("runner_up", "int32", (2,)),
    ]
    assert {t.encoding.zero_point for t in spec.inputs if t.name[:2] in ("k.", "v.")} == {128}
