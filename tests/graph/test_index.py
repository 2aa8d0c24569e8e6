"""Look-ups in a graph of one linear layer and one graph with large constants."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from hyco_export.errors import CompileError
from hyco_export.graph.index import SHAPE_DATA_LIMIT, GraphIndex, attribute
from tests.support.qdq_builder import QdqBuilder, random_linear


def linear() -> onnx.ModelProto:
    """x [4, 32] uint16 times a 4-bit weight [48, 32], on [-8, 8]."""
    build = QdqBuilder()
    x = build.input("x", (4, 32), -4, 4)
    integers, scales = random_linear(np.random.default_rng(0), 48, 32)
    w = build.weight("w", integers, scales, axis=0)
    build.output(build.quantize(build.node("Gemm", [build.real(x), w], ["y_out"], transB=1), "y", (4, 48), -8, 8))
    return build.model()


def test_types_and_shapes_of_inputs_constants_and_what_inference_tells() -> None:
    index = GraphIndex(linear())
    assert index.inputs == ["x"] and index.outputs == ["y"]
    assert index.element_type("x") == TensorProto.UINT16 and not index.is_float("x")
    assert index.element_type("w") == TensorProto.INT4 and index.shape("w") == (48, 32)
    assert index.is_float("y_out") and index.shape("y_out") == (4, 48)
    assert index.element_type("nothing") == 0 and index.shape("nothing") is None


def test_a_dimension_that_is_not_fixed_is_none() -> None:
    value = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["rows", 3])
    out = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["rows", 3])
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "g", [value], [out])
    assert GraphIndex(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)])).shape("x") == (None, 3)


def test_producers_consumers_and_where_values_come_from() -> None:
    index = GraphIndex(linear())
    (gemm,) = (node for node in index.nodes if node.op_type == "Gemm")
    assert index.producer["y_out"] == gemm and index.consumers["y_out"][0].op_type == "QuantizeLinear"
    assert index.made_by("y_out", "Gemm") == gemm and index.made_by("y_out", "Relu") is None
    real_x, real_w = gemm.input[:2]
    assert (index.stored(real_x), index.stored(real_w)) == ("x", "w") and index.stored("x") is None
    assert index.origin("y", frozenset({"Gemm"})) == "x" and index.origin("y", frozenset()) == "y_out"
    assert attribute(gemm, "transB", 0) == 1 and attribute(gemm, "transA", 7) == 7


def test_ranges_are_the_real_values_at_the_ends_of_the_integers() -> None:
    index = GraphIndex(linear())
    (gemm,) = (node for node in index.nodes if node.op_type == "Gemm")
    (reader,) = index.consumers["x"]
    low, high = index.range(reader) or (0.0, 0.0)
    assert (low, high) == (pytest.approx(-4, abs=1e-3), pytest.approx(4, abs=1e-3))
    weight = index.producer[gemm.input[1]]
    assert index.range(weight) is None  # a scale for each of 48 rows
    zeros = index.zero_points(weight)
    assert zeros is not None and not zeros.any()


def test_large_constants_keep_their_shape_and_values_outside_need_a_folder(tmp_path: Path) -> None:
    large = np.arange(2 * SHAPE_DATA_LIMIT, dtype=np.float32).reshape(2, -1)
    value = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 2])
    out = helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, SHAPE_DATA_LIMIT])
    node = helper.make_node("MatMul", ["x", "large"], ["y"])
    graph = helper.make_graph([node], "g", [value], [out], [numpy_helper.from_array(large, "large")])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)])
    index = GraphIndex(model)
    assert index.shape("large") == large.shape and np.array_equal(index.values("large"), large)
    onnx.save(model, tmp_path / "m.onnx", save_as_external_data=True, location="m.bin", size_threshold=0)
    outside = onnx.load(tmp_path / "m.onnx", load_external_data=False)
    assert np.array_equal(GraphIndex(outside, tmp_path).values("large"), large)
    with pytest.raises(CompileError, match="large lies outside the model file"):
        GraphIndex(outside).values("large")
