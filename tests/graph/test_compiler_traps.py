"""The compiler's silent traps, each on a tiny graph: a changed one means the lint rule, or its reason, is out of date.

Every test shows the wrong way beside the right one, so that it fails when an upgrade heals or widens the trap.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto

from hyco_export.core.encodings import Encoding, encoding_from_range
from hyco_export.core.numerics import sqnr_db
from hyco_export.core.targets import TARGETS
from hyco_export.errors import CompileError
from hyco_export.graph.lint import lint
from hyco_export.graph.parity import OutputParity, ReferenceSession, compare_sessions
from hyco_export.graph.qnn import compile_context, open_context
from tests.support.qdq_builder import QdqBuilder, Quantized, linear_in_blocks, random_linear

SM8850 = TARGETS["sm8850"]
X_SHAPE = (4, 32)
RIGHT_DB = 60.0  # a sound 16-bit graph of this size gives 67 dB or more
NOISE_DB = 20.0  # below: the output has nothing to do with the graph

Feed = dict[str, np.ndarray]
Measure = Callable[[QdqBuilder, Feed], OutputParity]


@pytest.fixture
def emulated(tmp_path: Path) -> Measure:
    """Compile a graph, run it in the emulator, and compare its first output with the CPU reference."""

    def measure(build: QdqBuilder, feed: Feed) -> OutputParity:
        model = build.save(tmp_path / "trap.onnx")
        compiled = compile_context(model, tmp_path, "trap", SM8850, tmp_path / "trap.log")
        with open_context(compiled.context_model, SM8850) as candidate:
            return compare_sessions(ReferenceSession(model), candidate, compiled.spec, [feed]).outputs[0]

    return measure


def x_feed(seed: int = 0) -> Feed:
    return {"x": np.random.default_rng(seed).integers(0, 65536, X_SHAPE).astype(np.uint16)}


def linear(
    dtype: int = TensorProto.INT4, limits: tuple[int, int] = (-8, 7), axis: int = 0, opset: int = 21, ir: int = 10
) -> QdqBuilder:
    build = QdqBuilder(opset, ir)
    x = build.input("x", X_SHAPE, -4, 4)
    integers, scales = random_linear(np.random.default_rng(1), 48, 32, *limits)
    scales = scales * 8 / max(limits[1], 1)
    weight = build.weight("w", integers, scales if axis == 0 else scales[:32], axis, dtype)
    build.output(build.quantize(build.node("Gemm", [build.real(x), weight], ["out"], transB=1), "y", (4, 48), -8, 8))
    return build


def index_of_largest(length: int) -> tuple[QdqBuilder, Feed]:
    build = QdqBuilder()
    x = build.input("x", (1, length), -4, 4)
    build.node("ArgMax", [build.real(x)], ["wide"], axis=1, keepdims=0)
    build.node("Cast", ["wide"], ["id"], to=TensorProto.INT32)
    build.plain_output("id", (1,))
    values = np.random.default_rng(0).integers(0, 60_000, (1, length)).astype(np.uint16)
    values[0, -5] = 65_535
    return build, {"x": values}


def test_argmax_is_right_up_to_65536_and_wraps_beyond(emulated: Measure) -> None:
    assert emulated(*index_of_largest(65_536)).equal_share == 1.0
    beyond = emulated(*index_of_largest(86_089))
    assert beyond.equal_share == 0.0
    assert beyond.max_abs == pytest.approx(65_536, abs=16)  # modulo, nearly: ties of half precision move it


def test_2_bit_weights_through_onnx_are_refused_because_they_give_noise(emulated: Measure) -> None:
    # when the noise is gone, the lint rule and `graph.smaller_binaries` can go too
    build = linear(TensorProto.INT2, (-2, 1), opset=25, ir=13)
    assert "int2" in {finding.rule for finding in lint(build.model())}
    two_bit = emulated(build, x_feed())
    carried = emulated(linear(TensorProto.INT4, (-2, 1)), x_feed())
    assert two_bit.sqnr_db < NOISE_DB
    assert carried.sqnr_db > 50  # 57 dB seen: small integers stand nearer to the accumulator's rounding


def test_4_bit_weight_without_stored_zero_point_gives_noise(emulated: Measure) -> None:
    bare = linear()
    del next(node for node in bare.nodes if node.input[0] == "w").input[2]
    assert emulated(bare, x_feed()).sqnr_db < NOISE_DB
    assert emulated(linear(), x_feed()).sqnr_db > RIGHT_DB


def test_scales_on_the_wrong_axis_give_noise(emulated: Measure) -> None:
    assert emulated(linear(axis=1), x_feed()).sqnr_db < NOISE_DB


def test_unsigned_4_bit_weights_give_noise(emulated: Measure) -> None:
    assert emulated(linear(TensorProto.UINT4, (0, 15)), x_feed()).sqnr_db < NOISE_DB


def test_4_bit_weight_with_an_offset_is_refused(emulated: Measure) -> None:
    build = linear()
    zeros = next(constant for constant in build.constants if constant.name == "w_zero")
    zeros.CopyFrom(onnx.helper.make_tensor("w_zero", TensorProto.INT4, [48], [1] * 48))
    with pytest.raises(CompileError, match=r"1 operator\(s\) would fall back to the CPU: Gemm"):
        emulated(build, x_feed())


def block_feed() -> Feed:
    return {"x": np.random.default_rng(0).integers(0, 65536, (4, 128)).astype(np.uint16)}


def test_low_power_blocks_are_right_and_float_block_scales_are_coarse(emulated: Measure) -> None:
    assert emulated(linear_in_blocks(), block_feed()).sqnr_db > 80  # 89 dB seen
    assert emulated(linear_in_blocks(nested=False), block_feed()).sqnr_db < 75  # 68 dB seen: half precision


def test_low_power_blocks_before_gemm_are_refused(emulated: Measure) -> None:
    with pytest.raises(CompileError, match="standalone DQ op with per-channel quantization"):
        emulated(linear_in_blocks(operator="Gemm"), block_feed())


def test_lookup_in_a_table_with_row_scales_is_refused(emulated: Measure) -> None:
    build = QdqBuilder()
    integers, scales = random_linear(np.random.default_rng(1), 64, 32)
    rows = build.weight("table", integers, scales, axis=0)
    real = build.node("Gather", [rows, build.plain_input("ids", (4,))], ["out"], axis=0)
    build.output(build.quantize(real, "y", (4, 32), -1, 1))
    with pytest.raises(CompileError, match="standalone DQ op with per-channel quantization"):
        emulated(build, {"ids": np.arange(4, dtype=np.int32)})


def attention_scores(k_dtype: str, zero_point: int) -> tuple[QdqBuilder, Feed]:
    rng = np.random.default_rng(3)
    build = QdqBuilder()
    q = build.input("q", (1, 8, 32), -4, 4)
    build.input("k", (1, 32, 24), -4, 4, k_dtype)
    k = Quantized("k", (1, 32, 24), Encoding(k_dtype, 8 / np.iinfo(k_dtype).max, zero_point))  # type: ignore[arg-type]
    real = build.node("MatMul", [build.real(q), build.real(k)], ["out"])
    build.output(build.quantize(real, "y", (1, 8, 24), -200, 200))
    return build, {
        "q": rng.integers(0, 65_536, (1, 8, 32)).astype(np.uint16),
        "k": rng.integers(0, np.iinfo(k_dtype).max + 1, (1, 32, 24)).astype(k_dtype),
    }


def test_8_bit_keys_lose_their_far_end_unless_the_grid_is_centred(emulated: Measure) -> None:
    centred = emulated(*attention_scores("uint8", 128)).sqnr_db
    off_by_one = emulated(*attention_scores("uint8", 127)).sqnr_db
    assert centred > 75 and off_by_one < centred - 15  # 84 and 57 dB seen


def test_16_bit_keys_cost_resolution(emulated: Measure) -> None:
    wide = emulated(*attention_scores("uint16", 32_768)).sqnr_db
    assert wide < emulated(*attention_scores("uint8", 128)).sqnr_db - 20  # 43 and 84 dB seen


def unary(operator: str, low: float, high: float, **attributes: object) -> QdqBuilder:
    build = QdqBuilder()
    x = build.input("x", X_SHAPE, -4, 4)
    build.output(build.quantize(build.node(operator, [build.real(x)], ["out"], **attributes), "y", X_SHAPE, low, high))
    return build


Step = Callable[[str, Quantized, Quantized | float, str, float, float], Quantized]


def steps_of(build: QdqBuilder) -> Step:
    """Adds a binary operation whose second operand may be a number, its result on a grid from low to high."""

    def step(operator: str, a: Quantized, b: Quantized | float, name: str, low: float, high: float) -> Quantized:
        if isinstance(b, float):
            b = Quantized(f"{name}_factor", (), Encoding("uint16", b / 65_535, 0))
            build.constant(b.name, np.uint16(65_535))
        real = build.node(operator, [build.real(a), build.real(b)], [f"{name}_out"])
        return build.quantize(real, name, X_SHAPE, low, high)

    return step


def gelu_written_out() -> QdqBuilder:
    """0.5x (1 + tanh(x (c2 + c1 x^2))), every step on its grid."""
    build = QdqBuilder()
    x, step = build.input("x", X_SHAPE, -4, 4), steps_of(build)
    square = step("Mul", x, x, "square", 0, 16)
    inner = step("Add", step("Mul", square, 0.0356774, "cubic", 0, 0.58), 0.7978846, "inner", 0, 1.4)
    argument = step("Mul", x, inner, "argument", -5.6, 5.6)
    bent = build.quantize(build.node("Tanh", [build.real(argument)], ["bent_out"]), "bent", X_SHAPE, -1, 1)
    build.output(step("Mul", step("Mul", x, 0.5, "half", -2, 2), step("Add", bent, 1.0, "gate", 0, 2), "y", -0.2, 4))
    return build


def silu_written_out() -> QdqBuilder:
    """h (1 + tanh h) with h = 0.5x, every step on its grid."""
    build = QdqBuilder()
    step = steps_of(build)
    half = step("Mul", build.input("x", X_SHAPE, -4, 4), 0.5, "half", -2, 2)
    bent = build.quantize(build.node("Tanh", [build.real(half)], ["bent_out"]), "bent", X_SHAPE, -1, 1)
    build.output(step("Mul", half, step("Add", bent, 1.0, "gate", 0, 2), "y", -0.3, 4))
    return build


def test_native_gelu_is_coarse_in_either_form(emulated: Measure) -> None:
    for form in ("none", "tanh"):
        assert emulated(unary("Gelu", -0.2, 4, approximate=form), x_feed()).sqnr_db < 75
    assert emulated(gelu_written_out(), x_feed()).sqnr_db > 78


def test_silu_by_tanh_is_fine(emulated: Measure) -> None:
    assert emulated(silu_written_out(), x_feed()).sqnr_db > 78


def test_tanh_is_put_on_the_vendors_own_grid(emulated: Measure) -> None:
    # harmless inside a graph, wrong at its end: the comparison of interfaces notices
    with pytest.raises(CompileError, match=r"output y is uint16 .* scale 3.05176e-05 .* in the binary"):
        emulated(unary("Tanh", -4, 4), x_feed())


def norm(on_a_grid: bool) -> QdqBuilder:
    rng = np.random.default_rng(2)
    build = QdqBuilder(23, 11)
    x = build.input("x", X_SHAPE, -4, 4)
    if on_a_grid:
        build.constant("scale", rng.integers(20_000, 60_000, 32).astype(np.uint16))
        scale = build.real(Quantized("scale", (32,), Encoding("uint16", 2 / 65_535, 0)))
    else:
        scale = build.constant("scale", rng.uniform(0.6, 1.8, 32).astype(np.float32))
    real = build.node("RMSNormalization", [build.real(x), scale], ["out"], axis=-1, epsilon=1e-6)
    build.output(build.quantize(real, "y", X_SHAPE, -6, 6))
    return build


def test_float_norm_scale_costs_10_db(emulated: Measure) -> None:
    assert emulated(norm(on_a_grid=True), x_feed()).sqnr_db > emulated(norm(on_a_grid=False), x_feed()).sqnr_db + 5


def test_topk_rounds_its_values(emulated: Measure) -> None:
    build = QdqBuilder()
    x = build.input("x", (1, 64), -4, 4)
    build.node("TopK", [build.real(x), build.constant("k", np.array([4]))], ["values", "wide"])
    build.output(build.quantize("values", "best", (1, 4), -4, 4))
    build.node("Cast", ["wide"], ["id"], to=TensorProto.INT32)
    build.plain_output("id", (1, 4))
    values = np.random.default_rng(0).permutation(65_536)[:64].astype(np.uint16)
    assert emulated(build, {"x": values[None]}).max_steps > 2  # up to 10 seen: half precision


def masked_softmax(low: float) -> tuple[QdqBuilder, Feed, np.ndarray]:
    """softmax(scores + mask) with a mask that reaches down to `low`; and what it is in float."""
    rng = np.random.default_rng(0)
    shape = (4, 64)
    build = QdqBuilder()
    scores, mask = build.input("scores", shape, -8, 8), build.input("mask", shape, low, 0)
    total = build.node("Add", [build.real(scores), build.real(mask)], ["total_out"])
    total = build.real(build.quantize(total, "total", shape, low - 8, 8))
    build.output(build.quantize(build.node("Softmax", [total], ["out"], axis=-1), "y", shape, 0, 1))
    feed = {
        "scores": rng.integers(0, 65_536, shape).astype(np.uint16),
        "mask": np.where(rng.random(shape) < 0.3, 0, 65_535).astype(np.uint16),
    }
    exact = scores.encoding.dequantize(feed["scores"]) + mask.encoding.dequantize(feed["mask"])
    powers = np.exp(exact - exact.max(axis=1, keepdims=True))
    return build, feed, powers / powers.sum(axis=1, keepdims=True)


@pytest.mark.parametrize(("low", "least_db", "most_db"), [(-100, 55, 99), (-1e4, 0, 35), (-1e9, -9, 9)])
def test_a_deep_mask_takes_the_resolution_of_a_16_bit_grid(low: float, least_db: float, most_db: float) -> None:
    # 65, 29 and 0.5 dB seen, by the grid alone, so whatever computes it
    build, feed, truth = masked_softmax(low)
    found = ReferenceSession(build.model().SerializeToString()).run(feed)["y"] / 65_535
    assert least_db < sqnr_db(truth, found) < most_db


def test_the_emulator_follows_a_mask_of_minus_100(emulated: Measure) -> None:
    build, feed, _ = masked_softmax(-100)
    assert emulated(build, feed).sqnr_db > 55


def norm_of_quiet_rows(native: bool) -> QdqBuilder:
    """x / rms(x) without a weight: as one operator, or written out with every step on its grid."""
    shape = (4, 64)
    build = QdqBuilder(23, 11)
    x = build.real(build.input("x", shape, -4, 4))
    if native:
        build.constant("scale", np.full(64, 65_535, np.uint16))
        scale = build.real(Quantized("scale", (64,), Encoding("uint16", 1 / 65_535, 0)))
        real = build.node("RMSNormalization", [x, scale], ["out"], axis=-1, epsilon=1e-9)
    else:
        square = build.quantize(build.node("Mul", [x, x], ["square_out"]), "square", shape, 0, 16)
        axes = build.constant("axes", np.array([-1]))
        mean = build.node("ReduceMean", [build.real(square), axes], ["mean_out"], keepdims=1)
        root = build.node("Sqrt", [build.real(build.quantize(mean, "mean", (4, 1), 0, 16))], ["root_out"])
        real = build.node("Div", [x, build.real(build.quantize(root, "root", (4, 1), 0, 4))], ["out"])
    build.output(build.quantize(real, "y", shape, -6, 6))
    return build


@pytest.mark.parametrize(("native", "least_db", "most_db"), [(True, 70, 99), (False, -20, 20)])
def test_a_norm_written_out_drowns_quiet_rows(native: bool, least_db: float, most_db: float, tmp_path: Path) -> None:
    build = norm_of_quiet_rows(native)
    x_grid = encoding_from_range(-4, 4, "uint16")
    loudness = np.array([1.0, 0.1, 0.01, 0.004])[:, None]
    feed = {"x": x_grid.quantize(np.random.default_rng(1).standard_normal((4, 64)) * loudness)}
    compiled = compile_context(build.save(tmp_path / "norm.onnx"), tmp_path, "norm", SM8850, tmp_path / "log")
    with open_context(compiled.context_model, SM8850) as session:
        found = encoding_from_range(-6, 6, "uint16").dequantize(session.run(feed)["y"])
    exact = x_grid.dequantize(feed["x"])
    truth = exact / np.sqrt(np.mean(exact**2, axis=1, keepdims=True))
    assert sqnr_db(truth[0], found[0]) > 55  # a loud row is right either way
    assert least_db < sqnr_db(truth[-1], found[-1]) < most_db  # 79 and 2 dB seen


def blockwise(x_dtype: str) -> tuple[QdqBuilder, Feed]:
    rng = np.random.default_rng(1)
    build = QdqBuilder()
    x = build.input("x", X_SHAPE, -4, 4, x_dtype)
    scales = rng.uniform(0.01, 0.02, (48, 2)).astype(np.float32)
    weight = build.weight("w", rng.integers(-8, 8, (48, 32)), scales, axis=1, block_size=16)
    build.output(build.quantize(build.node("Gemm", [build.real(x), weight], ["out"], transB=1), "y", (4, 48), -8, 8))
    return build, {"x": rng.integers(0, np.iinfo(x_dtype).max + 1, X_SHAPE).astype(x_dtype)}


def test_blockwise_scales_need_16_bit_activations(emulated: Measure) -> None:
    assert emulated(*blockwise("uint16")).sqnr_db > RIGHT_DB
    with pytest.raises(CompileError, match="standalone DQ op with per-channel quantization"):
        emulated(*blockwise("uint8"))
