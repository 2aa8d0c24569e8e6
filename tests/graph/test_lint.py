"""Every lint rule trips on a graph that breaks it alone, and clean graphs pass."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from hyco_export.core.encodings import Encoding
from hyco_export.errors import CompileError
from hyco_export.graph.lint import RULES, lint, require_clean
from tests.support.qdq_builder import QdqBuilder, Quantized, linear_in_blocks, random_linear, two_layer_mlp

RNG = np.random.default_rng(0)


def linear(opset: int = 21, ir_version: int = 10, act: str = "uint16", transposed: bool = True, **weight) -> QdqBuilder:
    """x [4, 32] times a weight [48, 32] (or its transpose); `weight` overrides QdqBuilder.weight's arguments."""
    build = QdqBuilder(opset, ir_version)
    x = build.input("x", (4, 32), -4, 4, act)
    integers, scales = random_linear(RNG, 48, 32, *weight.pop("limits", (-8, 7)))
    arguments = {
        "integers": integers if transposed else integers.T,
        "scales": scales,
        "axis": 0 if transposed else 1,
        **weight,
    }
    w = build.weight("w", **arguments)
    real = build.node("Gemm", [build.real(x), w], ["y_out"], transB=int(transposed))
    build.output(build.quantize(real, "y", (4, 48), -8, 8, act))
    return build


def unary(operator: str, opset: int = 21, ir_version: int = 10, **attributes) -> QdqBuilder:
    build = QdqBuilder(opset, ir_version)
    x = build.input("x", (4, 32), -4, 4)
    real = build.node(operator, [build.real(x)], ["y_out"], **attributes)
    build.output(build.quantize(real, "y", (4, 32), -4, 4))
    return build


def index_of(operator: str, length: int) -> QdqBuilder:
    build = QdqBuilder()
    x = build.input("x", (1, length), -4, 4)
    build.node(operator, [build.real(x)], ["wide"], axis=-1, keepdims=0)
    build.node("Cast", ["wide"], ["id"], to=TensorProto.INT32)
    build.plain_output("id", (1,))
    return build


def top_k() -> QdqBuilder:
    build = QdqBuilder()
    x = build.input("x", (1, 64), -4, 4)
    build.node("TopK", [build.real(x), build.constant("k", np.array([2]))], ["values", "wide"])
    build.output(build.quantize("values", "best", (1, 2), -4, 4))
    build.node("Cast", ["wide"], ["id"], to=TensorProto.INT32)
    build.plain_output("id", (1, 2))
    return build


def norm(scale_dtype: str = "uint16", opset: int = 23, ir_version: int = 11) -> QdqBuilder:
    build = QdqBuilder(opset, ir_version)
    x = build.input("x", (4, 32), -4, 4)
    scale = Quantized("scale", (32,), Encoding(scale_dtype, 0.01, 0))  # type: ignore[arg-type]
    build.constant("scale", RNG.integers(50, 200, 32).astype(scale_dtype))
    real = build.node("RMSNormalization", [build.real(x), build.real(scale)], ["y_out"], axis=-1)
    build.output(build.quantize(real, "y", (4, 32), -8, 8))
    return build


def masked_softmax(mask_low: float = -100.0, sum_low: float = -120.0, stored: bool = False) -> QdqBuilder:
    build = QdqBuilder()
    x = build.input("x", (4, 32), -20, 20)
    scores = build.quantize(build.node("Tanh", [build.real(x)], ["scores_out"]), "scores", (4, 32), -1, 1)
    if stored:
        mask = Quantized("mask", (4, 32), Encoding("uint8", -mask_low / 255, 255))
        build.constant("mask", np.where(np.tri(4, 32) > 0, 255, 0).astype(np.uint8))
    else:
        mask = build.input("mask", (4, 32), mask_low, 0)
    total = build.node("Add", [build.real(scores), build.real(mask)], ["sum_out"])
    masked = build.quantize(total, "sum", (4, 32), sum_low, 20)
    shaped = build.node("Reshape", [build.real(masked), build.constant("s", np.array([2, 2, 32]))], ["shaped_out"])
    reshaped = build.quantize(shaped, "shaped", (2, 2, 32), sum_low, 20)
    real = build.node("Softmax", [build.real(reshaped)], ["y_out"], axis=-1)
    build.output(build.quantize(real, "y", (2, 2, 32), 0, 1))
    return build


def attention(k_dtype: str, zero_point: int) -> QdqBuilder:
    build = QdqBuilder()
    q = build.input("q", (1, 4, 16), -4, 4)
    build.input("k", (1, 16, 8), -4, 4, k_dtype)
    k = Quantized("k", (1, 16, 8), Encoding(k_dtype, 0.03, zero_point))  # type: ignore[arg-type]
    real = build.node("MatMul", [build.real(q), build.real(k)], ["y_out"])
    build.output(build.quantize(real, "y", (1, 4, 8), -80, 80))
    return build


def table(dtype: int, limits: tuple[int, int]) -> QdqBuilder:
    build = QdqBuilder()
    integers, scales = random_linear(RNG, 64, 32, *limits)
    rows = build.weight("table", integers, scales[0], axis=0, dtype=dtype)
    real = build.node("Gather", [rows, build.plain_input("ids", (4,))], ["y_out"], axis=0)
    build.output(build.quantize(real, "y", (4, 32), -1, 1))
    return build


def float_island() -> QdqBuilder:
    build = unary("Tanh")
    build.nodes[-2].output[0] = "between"  # Tanh -> Abs without Q and DQ between them
    build.nodes.insert(-1, helper.make_node("Abs", ["between"], ["y_out"], name="abs"))
    return build


def float_constant() -> QdqBuilder:
    build = QdqBuilder()
    x = build.input("x", (4, 32), -4, 4)
    real = build.node("Mul", [build.real(x), build.constant("factor", np.float32(0.5))], ["y_out"])
    build.output(build.quantize(real, "y", (4, 32), -2, 2))
    return build


def float_output() -> QdqBuilder:
    build = two_layer_mlp()
    y = Quantized("y", (4, 32), Encoding("uint16", 4 / 65535, 32768))
    build.plain_output(build.real(y), (4, 32), "float32")
    return build


def wasted_dequantize() -> QdqBuilder:
    build = two_layer_mlp()
    build.real(Quantized("y", (4, 32), Encoding("uint16", 4 / 65535, 32768)))
    return build


def float_input() -> QdqBuilder:
    build = QdqBuilder()
    x = build.plain_input("x", (4, 32), "float32")
    build.output(build.quantize(x, "y", (4, 32), -4, 4))
    return build


def dynamic_batch() -> QdqBuilder:
    build = two_layer_mlp()
    build.inputs[0].type.tensor_type.shape.dim[0].dim_param = "batch"
    return build


def without_zero_point() -> QdqBuilder:
    build = linear()
    reader = next(node for node in build.nodes if node.input[0] == "w")
    del reader.input[2]
    return build


def on_wrong_axis() -> QdqBuilder:
    return linear(axis=1, scales=np.full(32, 0.01, np.float32))


CLEAN: dict[str, Callable[[], QdqBuilder]] = {
    "mlp": two_layer_mlp,
    "int4 in blocks": linear_in_blocks,
    "int4 [N, K]": linear,
    "int4 [K, N]": lambda: linear(transposed=False),
    "int8": lambda: linear(dtype=TensorProto.INT8, limits=(-128, 127)),
    "native norm": norm,
    "given mask": masked_softmax,
    "stored mask": lambda: masked_softmax(stored=True),
    "argmax at the limit": lambda: index_of("ArgMax", 65_536),
    "8-bit keys": lambda: attention("uint8", 128),
    "8-bit signed keys": lambda: attention("int8", 0),
    "int8 table": lambda: table(TensorProto.INT8, (-128, 127)),
}

BROKEN: list[tuple[str, str, Callable[[], QdqBuilder]]] = [
    ("opset", "opset 23 with IR 10", lambda: unary("Tanh", 23, 10)),
    ("opset", "opset 22 with IR 10", lambda: unary("Tanh", 22, 10)),
    ("fixed-shape", "shape [None, 32]", dynamic_batch),
    ("integer-io", "FLOAT at the graph's edge", float_input),
    ("float-island", "Tanh writes float between to ['Abs']", float_island),
    ("float-island", "Mul reads float factor", float_constant),
    ("trailing-dequantize", "DequantizeLinear after y ends the graph", wasted_dequantize),
    ("index-range", "ArgMax over 65537 elements", lambda: index_of("ArgMax", 65_537)),
    ("index-range", "ArgMin over 86089 elements", lambda: index_of("ArgMin", 86_089)),
    ("topk", "TopK of 16-bit values", top_k),
    ("gelu", "native Gelu", lambda: unary("Gelu", approximate="tanh")),
    ("decomposed-norm", "a norm written out with Sqrt", lambda: unary("Sqrt")),
    ("norm-scale", "the scale is not on a 16-bit grid", lambda: norm("uint8")),
    ("softmax-mask", "a mask that reaches -1e+04", lambda: masked_softmax(-1e4, -1e4)),
    ("softmax-mask", "a mask that reaches -20,", lambda: masked_softmax(-20, -60)),
    ("softmax-mask", "a mask that reaches -1000", lambda: masked_softmax(-1000, -1020, stored=True)),
    ("softmax-mask", "the masked scores are stored down to -30 only", lambda: masked_softmax(sum_low=-30)),
    ("wide-matmul", "MatMul of two 16-bit activations, q and k", lambda: attention("uint16", 32768)),
    ("matmul-offset", "k has zero point 127 instead of 128", lambda: attention("uint8", 127)),
    ("matmul-offset", "k has zero point 5 instead of 0", lambda: attention("int8", 5)),
    ("uint4", "UINT4 constant", lambda: linear(dtype=TensorProto.UINT4, limits=(0, 15))),
    ("int4-zero-point", "INT4 w without a stored zero point", without_zero_point),
    ("int4-zero-point", "INT4 w with a zero point other than 0", lambda: linear(zero_points=np.ones(48, np.int64))),
    ("int4-table", "Gather from INT4 table", lambda: table(TensorProto.INT4, (-8, 7))),
    ("channel-axis", "scales of w on axis 1, Gemm: the output channel is axis 0", on_wrong_axis),
    (
        "block-scales",
        "block-wise w with 8-bit x",
        lambda: linear_in_blocks(act="uint8"),
    ),
    ("block-scales", "block-wise w with float scales of its own", lambda: linear_in_blocks(nested=False)),
    ("block-scales", "block-wise w before Gemm, which takes none", lambda: linear_in_blocks(operator="Gemm")),
]


@pytest.mark.parametrize("name", CLEAN)
def test_clean_graph_has_no_findings(name: str) -> None:
    model = CLEAN[name]().model()
    onnx.checker.check_model(model)
    assert lint(model) == []
    require_clean(model, name)


@pytest.mark.parametrize(("rule", "text", "build"), BROKEN, ids=[f"{i}-{case[0]}" for i, case in enumerate(BROKEN)])
def test_broken_graph_trips_its_rule_alone(rule: str, text: str, build: Callable[[], QdqBuilder]) -> None:
    findings = lint(build().model())
    consequence = next(r.consequence for r in RULES if r.name == rule)
    assert {finding.rule for finding in findings} == {rule}, findings
    assert any(text in finding.message for finding in findings), findings
    assert all(finding.message.endswith(consequence) for finding in findings)


def test_float_output_trips_both_of_its_rules() -> None:
    assert {finding.rule for finding in lint(float_output().model())} == {"integer-io", "trailing-dequantize"}


def test_2_bit_weights_are_refused() -> None:
    model = linear(25, 13, dtype=TensorProto.INT2, limits=(-2, 1)).model()
    messages = {finding.rule: finding.message for finding in lint(model)}
    assert "INT2 constant; it compiles and gives noise: carry 2-bit integers in INT4" in messages["int2"]


def test_norm_before_its_opset_is_refused() -> None:
    findings = [finding for finding in lint(norm(opset=21, ir_version=10).model()) if finding.rule == "opset"]
    assert [finding.message.split(";")[0] for finding in findings] == ["RMSNormalization in opset 21"]


def test_every_rule_is_tripped_by_some_test() -> None:
    assert {rule.name for rule in RULES} == {rule for rule, _, _ in BROKEN} | {"int2"}


def test_weights_need_not_be_loaded(tmp_path: Path) -> None:
    # everything outside, zero points included: what a graph of gigabytes looks like
    path = tmp_path / "external.onnx"
    save = {"save_as_external_data": True, "location": "external.data", "size_threshold": 0}
    model = raw(linear().model())
    onnx.save(model, path, **save)
    light = onnx.load(path, load_external_data=False)
    assert all(c.data_location == TensorProto.EXTERNAL for c in light.graph.initializer)
    assert lint(light, tmp_path) == []
    onnx.save(raw(linear(zero_points=np.ones(48, np.int64)).model()), path, **save)
    assert [f.rule for f in lint(onnx.load(path, load_external_data=False), tmp_path)] == ["int4-zero-point"]
    with pytest.raises(CompileError, match=r"lies outside the model file \(say in which folder\)"):
        lint(onnx.load(path, load_external_data=False))


def raw(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with all constants as bytes: only those move to another file."""
    for constant in model.graph.initializer:
        packed = numpy_helper.from_array(numpy_helper.to_array(constant), constant.name)
        constant.CopyFrom(packed)
    return model


def test_require_clean_lists_findings_and_counts_the_rest() -> None:
    build = linear(dtype=TensorProto.UINT4, limits=(0, 15))
    for number in range(6):
        build.constants.append(helper.make_tensor(f"extra{number}", TensorProto.UINT4, [1], [0]))
    with pytest.raises(CompileError) as caught:
        require_clean(build.model(), "head")
    assert caught.value.message.startswith("head breaks 8 rule(s) of the NPU: uint4 at w: UINT4 constant; it falls")
    assert caught.value.message.endswith("| and 3 more")
