"""Integer initializers written and read back, and weights in a file beside the graphs, stored once for all of them."""

from pathlib import Path

import numpy as np
import onnx
import pytest

from hyco_export.core.device_spec import to_integers
from hyco_export.core.network.host import SlmHost
from hyco_export.core.network.weights import IntegerMatrix
from hyco_export.core.targets import TARGETS
from hyco_export.errors import CompileError
from hyco_export.graph import writer
from hyco_export.graph.lint import require_clean
from hyco_export.graph.parity import ReferenceSession
from hyco_export.graph.qnn import compile_context, open_context
from hyco_export.graph.slm_graphs import StoredMatrices, prefill_graph, tree_graph
from hyco_export.graph.writer import PAGE_BYTES, ExternalData, carried_matrix, read_weight, weight_tensor
from tests.support.packed_slm import ROWS, random_ids
from tests.support.slm_parts import MASK_VALUE, slm_parts

DATA = "slm_graphs.data"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Both graphs of the small SLM, with every matrix outside."""
    monkeypatch.setattr(writer, "INLINE_BYTES", 16)
    parts = slm_parts()
    with ExternalData(tmp_path / DATA) as data:
        for make, name in ((tree_graph, "tree"), (prefill_graph, "prefill")):
            model, _ = make(parts.network, parts.weights, parts.encodings, ROWS, data)
            onnx.save(model, tmp_path / f"{name}.onnx")
    return tmp_path


def feeds() -> dict[str, np.ndarray]:
    parts = slm_parts()
    host = SlmHost(parts.network, parts.tables, ROWS, MASK_VALUE)
    return to_integers(parts.tree.inputs, host.feeds(random_ids(ROWS), range(-1, ROWS - 1)))


def test_the_graph_computes_the_same(folder: Path) -> None:
    inside = ReferenceSession(slm_parts().tree_model.SerializeToString()).run(feeds())
    outside = ReferenceSession(folder / "tree.onnx").run(feeds())
    serialised = ReferenceSession((folder / "tree.onnx").read_bytes(), data_folder=folder).run(feeds())
    for name, values in inside.items():
        assert np.array_equal(outside[name], values)
        assert np.array_equal(serialised[name], values)


def test_weights_are_stored_once_and_unchanged(folder: Path) -> None:
    parts = slm_parts()
    tree, prefill = (onnx.load(folder / f"{name}.onnx", load_external_data=False) for name in ("tree", "prefill"))
    whole, part = StoredMatrices(tree, folder), StoredMatrices(prefill, folder)
    assert 0 < len(part) < len(whole)
    for name, matrix in parts.weights.integer_matrices().items():
        assert np.array_equal(whole[name][0], matrix.integers), name
        assert np.array_equal(whole[name][1], matrix.scales), name
    places = [
        {
            tensor.name: [(entry.key, entry.value) for entry in tensor.external_data]
            for tensor in model.graph.initializer
        }
        for model in (tree, prefill)
    ]
    assert all(places[0][name] == places[1][name] for name in part)
    offsets = {int(value) for entries in places[0].values() for key, value in entries if key == "offset"}
    assert len(offsets) > len(whole)
    assert not any(offset % PAGE_BYTES for offset in offsets)


def test_a_clean_graph_is_clean_with_its_folder_only(folder: Path) -> None:
    model = onnx.load(folder / "tree.onnx", load_external_data=False)
    require_clean(model, "tree", folder)
    with pytest.raises(CompileError, match="lies outside the model file"):
        require_clean(model, "tree")


def test_the_compiler_reads_the_file(folder: Path) -> None:
    target = TARGETS["sm8850"]
    context = compile_context(folder / "tree.onnx", folder, "slm_tree", target, folder / "log")
    onnx.save(slm_parts().tree_model, folder / "inside.onnx")
    inside = compile_context(folder / "inside.onnx", folder, "inside", target, folder / "log")
    with open_context(context.context_model, target) as one, open_context(inside.context_model, target) as other:
        found, wanted = one.run(feeds()), other.run(feeds())
    assert all(np.array_equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize(
    ("bits", "kind"), [(2, onnx.TensorProto.INT4), (4, onnx.TensorProto.INT4), (8, onnx.TensorProto.INT8)]
)
@pytest.mark.parametrize("shape", [(3, 4), (3, 5), (1, 1)])
def test_round_trip(bits: int, kind: int, shape: tuple[int, int]) -> None:
    low, high = -(2 ** (bits - 1)), 2 ** (bits - 1)
    integers = np.random.default_rng(0).integers(low, high, shape).astype(np.int8)
    integers.flat[0] = low
    tensor = weight_tensor("w", integers, bits)
    assert tensor.data_type == kind
    assert np.array_equal(read_weight(tensor), integers)
    assert np.array_equal(onnx.numpy_helper.to_array(tensor).astype(np.int8), integers)  # as onnx itself reads it


def test_a_matrix_brings_scales_and_zeros_per_output_channel() -> None:
    matrix = IntegerMatrix(np.ones((5, 3), np.int8), np.arange(5, dtype=np.float32), 4)
    weight, scale, zero = carried_matrix("w", matrix)
    assert list(weight.dims) == [5, 3]
    assert onnx.numpy_helper.to_array(scale).tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert zero.data_type == weight.data_type
    assert read_weight(zero).tolist() == [0] * 5
