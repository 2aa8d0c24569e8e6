"""Outlier channels are found where they are, and splitting them changes the integer graph's precision alone."""

from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import onnx
import pytest

from hyco_export.core.device_spec import to_integers, to_real
from hyco_export.core.network.host import SlmHost
from hyco_export.core.network.quantisation import slm_encodings
from hyco_export.core.network.slm import GATE, SlmNetwork, split_weights, stream_tensors
from hyco_export.core.network.weights import Weights
from hyco_export.core.tables import TABLES_FILE, HostTables, save_tables
from hyco_export.core.targets import TARGETS
from hyco_export.graph.lint import lint
from hyco_export.graph.parity import ReferenceSession, sqnr_db
from hyco_export.graph.qnn import compile_context, open_context
from hyco_export.graph.slm_graphs import prefill_graph, tree_graph
from hyco_export.graph.writer import read_weight
from hyco_export.models.slm.calibration import calibrated_ranges
from hyco_export.models.slm.float import FloatCheckpoint, Rounding
from hyco_export.models.slm.outliers import bits_won, channel_peaks, choose_copies, largest_difference
from hyco_export.models.slm.packed import PackedCheckpoint
from hyco_export.models.slm.static_pass import FloatSlm
from hyco_export.models.slm.surgery import host_tables, slm_network, slm_weights
from hyco_export.models.torch_ops import TorchWeights
from tests.support.float_slm import CONFIGS, save_float_slm
from tests.support.outlier_slm import plant_outlier
from tests.support.packed_slm import RINGS, ROWS, random_ids, save_packed_slm
from tests.support.slm_parts import embedded_slm_parts

KEPT = np.arange(0, 96, 3)
MASK_VALUE, CHANNEL = -100.0, 5
SEQUENCES = [random_ids(40, seed) for seed in range(4)]


class Slm:
    """A checkpoint's network with its tables and weights."""

    def __init__(self, folder: Path, checkpoint: PackedCheckpoint | FloatCheckpoint) -> None:
        self.network = slm_network(checkpoint, RINGS)
        self.weights = slm_weights(checkpoint, KEPT)
        self.slm = FloatSlm(self.network, TorchWeights(self.weights))
        save_tables(folder / TABLES_FILE, host_tables(checkpoint))
        self.tables = HostTables(folder / TABLES_FILE)

    def split(self, copies: dict[int, int]) -> tuple[SlmNetwork, Weights, FloatSlm]:
        network = msgspec.structs.replace(self.network, copies=copies)
        weights = split_weights(network, self.weights)
        return network, weights, FloatSlm(network, TorchWeights(weights))


@pytest.fixture(scope="module")
def outlying(tmp_path_factory: pytest.TempPathFactory) -> Slm:
    """Of E2B's structure, with per-layer embeddings, shared K/V and layer scalars."""
    folder = plant_outlier(save_packed_slm(tmp_path_factory.mktemp("outlier")), CHANNEL, 3000.0)
    return Slm(folder, PackedCheckpoint(folder))


# ---- how many copies


def peaks(*tall: dict[int, float], width: int = 64) -> dict[str, np.ndarray]:
    found = {}
    for number, channels in enumerate(tall):
        found[f"t{number}"] = np.ones(width, np.float32)
        for channel, value in channels.items():
            found[f"t{number}"][channel] = value
    return found


@pytest.mark.parametrize(
    ("tall", "most", "wanted"),
    [
        ([{}], 64, {}),
        ([{3: 60.0}], 64, {}),  # 16 bits hold both
        ([{3: 1000.0}], 2, {}),
        ([{3: 1000.0}], 3, {3: 4}),
        ([{3: 1000.0}], 14, {3: 4}),
        ([{3: 1000.0}], 15, {3: 16}),
        ([{3: 1000.0}, {7: 500.0}], 30, {3: 16, 7: 16}),  # each tensor has its own
        ([{3: 1000.0, 7: 300.0}], 15, {3: 4}),  # two bits would take 18: one of the copies of 7
        ([{3: 1000.0, 7: 300.0}], 18, {3: 16, 7: 4}),
        ([{3: 60.0, 7: 50.0}, {3: 1000.0}], 15, {3: 16}),  # a tensor without outliers asks for nothing
    ],
)
def test_copies_win_as_many_bits_as_there_is_room_for(
    tall: list[dict[int, float]], most: int, wanted: dict[int, int]
) -> None:
    assert choose_copies(peaks(*tall), most) == wanted


def test_bits_won_are_those_of_the_range(outlying: Slm) -> None:
    network = msgspec.structs.replace(outlying.network, hidden=64, copies={3: 16})
    assert bits_won(peaks({3: 1000.0}, {3: 60.0}), network) == pytest.approx(2.0)
    assert bits_won(peaks({3: 1000.0, 7: 500.0}), network) == pytest.approx(1.0)


def test_peaks_are_those_of_every_tensor_of_the_stream(outlying: Slm) -> None:
    found = channel_peaks(outlying.slm, outlying.tables, SEQUENCES, ROWS, MASK_VALUE)
    assert set(found) == set(stream_tensors(outlying.network))
    assert found["layers.0.fed"].argmax() == CHANNEL
    assert found["layers.0.fed"].max() > 500 * np.median(found["layers.0.fed"])
    assert choose_copies(found, 63) == {CHANNEL: 64}


def test_the_embedded_slm_has_none() -> None:
    parts = embedded_slm_parts()
    rng = np.random.default_rng(0)
    sequences = [rng.choice(1024, 64).tolist() for _ in range(2)]
    found = channel_peaks(parts.float_slm, parts.tables, sequences, 32, MASK_VALUE)
    assert choose_copies(found, parts.network.hidden) == {}


# ---- the same network


@pytest.mark.parametrize("name", CONFIGS)
def test_every_family_computes_the_same_with_copies(name: str, tmp_path: Path) -> None:
    checkpoint = FloatCheckpoint(
        save_float_slm(tmp_path, CONFIGS[name]()), Rounding(8, 8, np.array([1.0], dtype=np.float64))
    )
    whole = Slm(tmp_path, checkpoint)
    network, _, split = whole.split({CHANNEL: 4, 17: 16})
    assert network.stream_width == network.hidden + 18
    text = (whole.tables, SEQUENCES[:2], ROWS, MASK_VALUE)
    assert largest_difference(whole.slm, split, *text, max_passes=12) < 1e-4
    feeds = SlmHost(network, whole.tables, ROWS, MASK_VALUE).feeds(random_ids(ROWS, 3), [-1, 0, 0, 1, -1, 4])
    wanted, found = whole.slm.prefill(feeds), split.prefill(feeds)
    assert wanted.keys() == found.keys()
    for key in wanted:
        np.testing.assert_allclose(found[key], wanted[key], atol=2e-4)


def test_a_wrong_factor_is_seen(outlying: Slm) -> None:
    network, weights, _ = outlying.split({CHANNEL: 16})
    wrong = replace(weights, vectors={**weights.vectors, "norm": weights.vectors["norm"] * np.float32(1.01)})
    text = (outlying.tables, SEQUENCES[:1], ROWS, MASK_VALUE)
    assert largest_difference(outlying.slm, FloatSlm(network, TorchWeights(wrong)), *text, max_passes=2) > 5e-3


# ---- its integer graph


def measured(whole: Slm, network: SlmNetwork, weights: Weights, slm: FloatSlm) -> tuple[onnx.ModelProto, float]:
    """The tree graph, and its logits beside the float network's in dB over some passes."""
    tell = lambda done, total: None  # noqa: E731
    ranges = calibrated_ranges(slm, whole.tables, SEQUENCES, ROWS, MASK_VALUE, 100.0, 99.9, tell)
    encodings = slm_encodings(network, ranges, 1.2, 1.2, MASK_VALUE)
    model, spec = tree_graph(network, weights, encodings, ROWS)
    prefill, _ = prefill_graph(network, weights, encodings, ROWS)
    for graph in (model, prefill):
        onnx.checker.check_model(graph, full_check=True)
        assert lint(graph) == []
    session = ReferenceSession(model.SerializeToString())
    wanted, found = [], []
    host = SlmHost(network, whole.tables, ROWS, MASK_VALUE)
    for start in range(0, 18, ROWS):
        feeds = to_integers(spec.inputs, host.feeds(SEQUENCES[0][start : start + ROWS], range(-1, ROWS - 1)))
        output = to_real(spec.outputs, session.run(feeds))
        wanted.append(slm.tree(to_real(spec.inputs, feeds))["logits"])
        found.append(output["logits"])
        host.commit(output, range(ROWS))
    return model, sqnr_db(np.concatenate(wanted), np.concatenate(found))


def constants(model: onnx.ModelProto) -> dict[str, onnx.TensorProto]:
    return {tensor.name: tensor for tensor in model.graph.initializer}


def test_an_integer_graph_is_nearer_to_the_float_network(outlying: Slm) -> None:
    whole, whole_db = measured(outlying, outlying.network, outlying.weights, outlying.slm)
    split, split_db = measured(outlying, *outlying.split({CHANNEL: 64}))
    assert split_db > whole_db + 3.0
    stored = constants(split)
    for tensor in whole.graph.initializer:  # no integer of a linear layer is another
        if tensor.name in outlying.weights.matrices and not tensor.name.endswith(GATE):
            assert stored[tensor.name] == tensor
    for layer in range(len(outlying.network.layers)):
        name = f"layers.{layer}.{GATE}"
        before, after = (read_weight(tensors[name]) for tensors in (constants(whole), stored))
        assert np.array_equal(after, before[:, [*range(32), *[CHANNEL] * 7]])


def emulated_db(whole: Slm, network: SlmNetwork, weights: Weights, slm: FloatSlm, folder: Path) -> float:
    """Logits of the compiled tree graph beside the float network's in dB."""
    folder.mkdir()
    ranges = calibrated_ranges(slm, whole.tables, SEQUENCES, ROWS, MASK_VALUE, 100.0, 99.9, lambda done, total: None)
    model, spec = tree_graph(network, weights, slm_encodings(network, ranges, 1.2, 1.2, MASK_VALUE), ROWS)
    onnx.save(model, folder / "slm_tree.onnx")
    target = TARGETS["sm8850"]
    context = compile_context(folder / "slm_tree.onnx", folder, "slm_tree", target, folder / "log")
    host = SlmHost(network, whole.tables, ROWS, MASK_VALUE)
    feeds = to_integers(spec.inputs, host.feeds(SEQUENCES[0][:ROWS], range(-1, ROWS - 1)))
    with open_context(context.context_model, target) as session:
        found = to_real(spec.outputs, session.run(feeds))
    return sqnr_db(slm.tree(to_real(spec.inputs, feeds))["logits"], found["logits"])


def test_the_compiler_takes_a_graph_with_copies_and_computes_it_better(outlying: Slm, tmp_path: Path) -> None:
    whole = emulated_db(outlying, outlying.network, outlying.weights, outlying.slm, tmp_path / "whole")
    split = emulated_db(outlying, *outlying.split({CHANNEL: 64}), tmp_path / "split")
    assert split > whole + 3.0
