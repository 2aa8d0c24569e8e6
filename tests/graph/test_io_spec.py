"""Inputs, outputs and their encodings are read from the graph itself."""

import numpy as np
import pytest
from onnx import TensorProto

from hyco_export.core.encodings import encoding_from_range
from hyco_export.errors import CompileError
from hyco_export.graph.io_spec import read_io_spec
from tests.support.qdq_builder import QdqBuilder, two_layer_mlp


def test_inputs_and_outputs_carry_their_grids() -> None:
    spec = read_io_spec(two_layer_mlp().model(), "mlp")
    assert spec.name == "mlp"
    assert (spec.input("x").shape, spec.input("x").dtype) == ((4, 32), "uint16")
    assert spec.input("x").encoding == encoding_from_range(-4, 4, "uint16")
    assert spec.output("y").encoding == encoding_from_range(-2, 2, "uint16")


def test_grids_are_found_behind_layout_and_ids_have_none() -> None:
    build = QdqBuilder()
    table = build.input("table", (8, 16), -1, 1, "uint8")
    moved = build.node("Reshape", [table.name, build.constant("shape", np.array([16, 8]))], ["moved"])
    picked = build.node("Gather", [moved, build.plain_input("ids", (3,))], ["picked"], axis=0)
    real = build.node("DequantizeLinear", [picked, *build.grid("table", table.encoding)], ["picked_real"])
    out = build.quantize(build.node("Tanh", [real], ["t"]), "y", (3, 8), -1, 1)
    turned = build.node("Transpose", [out.name], ["turned"], perm=[1, 0])
    build.plain_output(turned, (8, 3), "uint16")
    spec = read_io_spec(build.model(), "g")
    assert spec.input("table").encoding == table.encoding
    assert spec.input("ids").encoding is None and spec.input("ids").dtype == "int32"
    assert spec.output("turned").encoding == out.encoding


def test_an_output_of_indices_has_no_grid() -> None:
    build = QdqBuilder()
    x = build.input("x", (1, 64), -1, 1)
    build.node("ArgMax", [build.real(x)], ["wide"], axis=-1)
    build.node("Cast", ["wide"], ["id"], to=TensorProto.INT32)
    build.plain_output("id", (1, 1))
    assert read_io_spec(build.model(), "g").output("id").encoding is None


def test_a_symbolic_dimension_is_refused() -> None:
    build = two_layer_mlp()
    build.inputs[0].type.tensor_type.shape.dim[0].dim_param = "rows"
    with pytest.raises(CompileError, match=r"x has no fixed shape \(an NPU graph is static"):
        read_io_spec(build.model(), "g")
