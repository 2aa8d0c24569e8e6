"""EPContext models by hand: what is read from a right one, and how each wrong one is refused."""

from pathlib import Path

import onnx
import pytest
from onnx import TensorProto, helper

from hyco_export.errors import CompileError
from hyco_export.graph.context_check import COMPATIBILITY_KEY, read_context_model

TARGET = "v2:6:2.38:1.0:81:87:8:0"


def context_model(nodes: int = 1, embed_mode: int = 0, target: str = TARGET) -> onnx.ModelProto:
    value = helper.make_tensor_value_info("x", TensorProto.UINT16, [1, 4])
    out = helper.make_tensor_value_info("y", TensorProto.UINT8, [1, 4])
    facts = {"embed_mode": embed_mode, "ep_cache_context": "g.bin", "partition_name": "g", "ep_sdk_version": "2.38"}
    made = [
        helper.make_node("EPContext", ["x"], [f"y{number or ''}"], domain="com.microsoft", **facts)
        for number in range(nodes)
    ]
    model = helper.make_model(helper.make_graph(made, "g", [value], [out]))
    helper.set_model_props(model, {COMPATIBILITY_KEY: target})
    return model


def test_a_context_model_says_its_binary_its_target_and_its_tensors(tmp_path: Path) -> None:
    onnx.save(context_model(), tmp_path / "g_ctx.onnx")
    found = read_context_model(tmp_path / "g_ctx.onnx")
    assert (found.binary, found.graph, found.sdk_version) == ("g.bin", "g", "2.38")
    assert (found.htp_arch, found.soc_model, found.vtcm_mb) == (81, 87, 8)
    assert [(one.name, one.shape, one.dtype) for one in found.inputs] == [("x", (1, 4), "uint16")]
    assert [(one.name, one.shape, one.dtype) for one in found.outputs] == [("y", (1, 4), "uint8")]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"nodes": 0}, "must hold one EPContext node and nothing else, it holds: nothing"),
        ({"nodes": 2}, "it holds: EPContext, EPContext"),
        ({"embed_mode": 1}, "holds its binary inside"),
        ({"target": ""}, "does not say its target"),
        ({"target": "v1:6:2.38:1.0:81:87:8:0"}, "does not say its target"),
        ({"target": "v2:6:81:87:8"}, "does not say its target"),
    ],
)
def test_a_wrong_context_model_is_refused(tmp_path: Path, changes: dict, words: str) -> None:
    onnx.save(context_model(**changes), tmp_path / "g_ctx.onnx")
    with pytest.raises(CompileError, match=words):
        read_context_model(tmp_path / "g_ctx.onnx")


def test_a_missing_file_and_one_of_another_kind_name_the_command_that_makes_it(tmp_path: Path) -> None:
    path = tmp_path / "g_ctx.onnx"
    with pytest.raises(CompileError, match=r"does not exist.*hyco-export compile"):
        read_context_model(path)
    path.write_bytes(b"\xff\xff no model")
    with pytest.raises(CompileError, match=r"is not an ONNX model.*hyco-export compile"):
        read_context_model(path)
