"""ONNX graphs without their weights."""

import time
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from safetensors.numpy import save_file

from hyco_export.errors import FormatError
from hyco_export.workbench.facts import chunks
from hyco_export.workbench.files import read_file
from tests.support.qdq_builder import two_layer_mlp
from tests.workbench.test_files import LIMIT_S, written


def test_a_graph_shows_what_its_inputs_mean_and_where_its_weights_lie(tmp_path: Path) -> None:
    path = two_layer_mlp().save(tmp_path / "mlp.onnx")
    facts, model = read_file(path), onnx.load(path)
    tensors = {(tensor.role, tensor.name): tensor for tensor in facts.tensors}
    assert tensors["input", "x"].shape == (4, 32) and "scale" in tensors["input", "x"].encoding
    assert "zero point" in tensors["output", "y"].encoding
    compared = 0
    for tensor in model.graph.initializer:
        if tensor.name in facts.stored:
            values = np.concatenate(list(chunks(facts.stored[tensor.name], tensors["weight", tensor.name].dtype)))
            wanted = onnx.numpy_helper.to_array(tensor).astype(np.float64).ravel()
            np.testing.assert_array_equal(values[: wanted.size], wanted)
            compared += 1
    assert compared > 5 and any(tensor.dtype == "int4" for tensor in facts.tensors)


def circular_graph(weights_in: str = "") -> onnx.ModelProto:
    """Reshapes in a circle, and concatenations that double their paths at every step."""
    nodes = [helper.make_node("Reshape", ["x", "s"], ["a0"]), helper.make_node("Reshape", ["b", "s"], ["c"])]
    nodes += [helper.make_node("Reshape", ["c", "s"], ["b"])]
    nodes += [helper.make_node("Concat", [f"a{n}", f"a{n}"], [f"a{n + 1}"], axis=0) for n in range(200)]
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in ("x", "b", "a200")]
    graph = helper.make_graph(nodes, "circle", values[:1], values[1:])
    if weights_in:
        tensor = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[4], data_location=TensorProto.EXTERNAL)
        tensor.external_data.add(key="location", value=weights_in)
        graph.initializer.append(tensor)
    return helper.make_model(graph)


def test_graphs_that_run_in_circles_are_read(tmp_path: Path) -> None:
    path = written(tmp_path, "circle.onnx", circular_graph().SerializeToString())
    begun = time.process_time()
    facts = read_file(path)
    assert time.process_time() - begun < LIMIT_S
    assert [tensor.encoding for tensor in facts.tensors] == ["", "", ""]


def test_weights_outside_the_folder_are_refused(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(bytes(16))
    (tmp_path / "model").mkdir()
    for place in ("../secret", "/etc/passwd"):
        path = written(tmp_path / "model", "m.onnx", circular_graph(place).SerializeToString())
        with pytest.raises(FormatError, match="points out of the folder"):
            read_file(path)
    save_file({"a": np.zeros(3)}, tmp_path / "model" / "beside")
    path = written(tmp_path / "model", "m.onnx", circular_graph("beside").SerializeToString())
    assert read_file(path).stored["w"].path.name == "beside"
