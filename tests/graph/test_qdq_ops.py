"""Every operation in the integer graph computes what the torch backend computes, to the resolution of its grids."""

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest
import torch

from hyco_export.core.device_spec import to_integers, to_real
from hyco_export.core.encodings import Encoding, encoding_from_range, symmetric_encoding
from hyco_export.core.network import blocks
from hyco_export.core.network.blocks import ARGMAX_LIMIT, Ops
from hyco_export.core.network.weights import IntegerMatrix, IntegerTable, Weights
from hyco_export.core.numerics import sqnr_db
from hyco_export.graph.lint import lint
from hyco_export.graph.parity import ReferenceSession
from hyco_export.graph.qdq_ops import QdqOps
from hyco_export.models.torch_ops import RangeObserver, TorchOps, TorchWeights

GENERATOR = np.random.default_rng(7)
Build = Callable[[Ops[Any]], None]
ROWS, WIDTH, OUT = 5, 12, 7


def matrix(rows: int, columns: int, bits: int) -> IntegerMatrix:
    low, high = -(2 ** (bits - 1)), 2 ** (bits - 1)
    integers = GENERATOR.integers(low, high, (rows, columns)).astype(np.int8)
    return IntegerMatrix(integers, (GENERATOR.random(rows) * 0.02 + 0.01).astype(np.float32), bits)


def block_matrix(rows: int, columns: int, block: int) -> IntegerMatrix:
    generator = np.random.default_rng(8)
    integers = generator.integers(-8, 8, (rows, columns)).astype(np.int8)
    multipliers = generator.integers(1, 17, (rows, columns // block)).astype(np.uint8)
    return IntegerMatrix(integers, (generator.random(rows) * 0.003 + 0.001).astype(np.float32), 4, multipliers)


WEIGHTS = Weights(
    matrices={**{f"w{bits}": matrix(OUT, WIDTH, bits) for bits in (2, 4, 8)}, "blocks": block_matrix(OUT, WIDTH, 4)},
    vectors={"norm": (GENERATOR.random(WIDTH) - 0.3).astype(np.float32)},
    tables={
        "table": IntegerTable(
            GENERATOR.integers(0, 256, (40, WIDTH)).astype(np.uint8), (GENERATOR.random(40) + 0.1).astype(np.float32)
        )
    },
)
FEEDS = {
    "x": GENERATOR.normal(size=(ROWS, WIDTH)).astype(np.float32),
    "y": GENERATOR.normal(size=(ROWS, WIDTH)).astype(np.float32),
    "keys": GENERATOR.normal(size=(WIDTH, 9)).astype(np.float32),
    "mask": np.where(GENERATOR.random((ROWS, WIDTH)) < 0.5, 0.0, -100.0).astype(np.float32),
    "line": GENERATOR.normal(size=(1, 40)).astype(np.float32),
}
SHAPES = {name: values.shape for name, values in FEEDS.items()}


def encodings_of(build: Build, feeds: dict[str, np.ndarray] = FEEDS) -> dict[str, Encoding]:
    """16-bit grids over the ranges seen in float and a little more; 8-bit for `keys`; the mask's own."""
    observer = RangeObserver(100.0, passes=1)
    float_outputs(build, feeds, observer)
    wide = {name: (1.1 * low, 1.1 * high) for name, (low, high) in observer.ranges().items()}
    found = {name: encoding_from_range(*bounds, "uint16") for name, bounds in blocks.cut_where_flat(wide).items()}
    found["keys"] = symmetric_encoding(float(np.abs(FEEDS["keys"]).max()), "uint8")
    found["mask"] = encoding_from_range(-100.0, 0.0, "uint16")
    return found


def float_outputs(
    build: Build, feeds: dict[str, np.ndarray], observe: Callable[[str, torch.Tensor], None]
) -> dict[str, np.ndarray]:
    tensors = {name: torch.from_numpy(np.array(values)) for name, values in feeds.items()}
    ops = TorchOps(TorchWeights(WEIGHTS), tensors, observe)
    build(ops)
    return {name: tensor.numpy() for name, tensor in ops.outputs.items()}


def emitted(build: Build) -> QdqOps:
    ops = QdqOps("graph", WEIGHTS, encodings_of(build))
    build(ops)
    return ops


def run_both(build: Build) -> list[tuple[np.ndarray, np.ndarray]]:
    """(float, graph) of every output, on the same quantised inputs; the graph must pass the checker and the lint."""
    ops = emitted(build)
    model, spec = ops.model(), ops.spec()
    onnx.checker.check_model(model, full_check=True)
    assert lint(model) == []
    integers = to_integers(spec.inputs, FEEDS)
    found = to_real(spec.outputs, ReferenceSession(model.SerializeToString()).run(integers))
    wanted = float_outputs(build, to_real(spec.inputs, integers), lambda name, values: None)
    return [(wanted[name], found[name]) for name in wanted]


def result_of(operation: Callable[[Ops[Any], Any], Any], source: str = "x") -> Build:
    """A network of one input and one operation called `out`."""

    def build(ops: Ops[Any]) -> None:
        ops.output("out", operation(ops, ops.input(source, SHAPES[source])))

    return build


SIXTEEN_BITS = 75.0  # dB; a uniform 16-bit grid over a bell-shaped range gives 85 to 90
ONE_INPUT = {
    "linear2": lambda ops, x: ops.linear("out", x, "w2"),
    "linear4": lambda ops, x: ops.linear("out", x, "w4"),
    "linear8": lambda ops, x: ops.linear("out", x, "w8"),
    "linear in blocks": lambda ops, x: ops.linear("out", x, "blocks"),
    "rms_norm": lambda ops, x: ops.rms_norm("out", x, "norm", 1e-6),
    "rms_norm with a large epsilon": lambda ops, x: ops.rms_norm("out", x, "norm", 0.5),
    "rms_norm without weight": lambda ops, x: ops.rms_norm("out", x, None, 1e-6),
    "add": lambda ops, x: ops.add("out", x, ops.input("y", SHAPES["y"])),
    "mul": lambda ops, x: ops.mul("out", x, ops.input("y", SHAPES["y"])),
    "square": lambda ops, x: ops.mul("out", x, x),
    "scale": lambda ops, x: ops.scale("out", x, 0.37),
    "shift": lambda ops, x: ops.shift("out", x, 1.5),
    "tanh": lambda ops, x: ops.tanh("out", x),
    "softmax": lambda ops, x: ops.softmax("out", x),
    "masked softmax": lambda ops, x: ops.softmax(
        "out", ops.mask("m", ops.scale("scores", x, 2.0), ops.input("mask", SHAPES["mask"]))
    ),
    "matmul": lambda ops, x: ops.matmul("out", x, ops.input("keys", SHAPES["keys"])),
    "reshape": lambda ops, x: ops.reshape("out", x, (ROWS, 3, 4)),
    "transpose": lambda ops, x: ops.transpose("out", x, (1, 0)),
    "slice": lambda ops, x: ops.slice("out", x, 1, 3, 8),
    "concat": lambda ops, x: ops.concat("out", [x, x], 1),
    "gelu": lambda ops, x: blocks.gelu(ops, "out", x),
    "silu": lambda ops, x: blocks.silu(ops, "out", x),
    "soft-cap": lambda ops, x: blocks.soft_cap(ops, "out", x, 2.0),
}


@pytest.mark.parametrize("operation", ONE_INPUT.values(), ids=ONE_INPUT)
def test_operation_equals_float(operation: Callable[[Ops[Any], Any], Any]) -> None:
    [(wanted, found)] = run_both(result_of(operation))
    assert wanted.shape == found.shape
    assert sqnr_db(wanted, found) > SIXTEEN_BITS


@pytest.mark.parametrize("cut", [True, False])
def test_large_gates_take_no_resolution_from_small_ones(cut: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """One gate of 60 beside gates around 1: without the cut the argument's grid has steps of 0.2."""
    if not cut:
        monkeypatch.setattr(blocks, "cut_where_flat", dict)
    gates = FEEDS["x"].copy()
    gates[0, 0], gates[1, 0] = 60.0, -60.0
    build = result_of(ONE_INPUT["gelu"])
    ops = QdqOps("graph", WEIGHTS, encodings_of(build, {"x": gates}))
    build(ops)
    integers = to_integers(ops.spec().inputs, {"x": gates})
    found = to_real(ops.spec().outputs, ReferenceSession(ops.model().SerializeToString()).run(integers))["out"]
    wanted = float_outputs(build, to_real(ops.spec().inputs, integers), lambda name, values: None)["out"]
    assert np.allclose(found[:2, 0], [60.0, 0.0], atol=0.01)
    small = np.abs(gates) < 10
    assert (sqnr_db(wanted[small], found[small]) > 55.0) == cut


def test_convert_to_eight_bits_is_one_rounding() -> None:
    def build(ops: Ops[Any]) -> None:
        ops.input("keys", SHAPES["keys"])
        ops.output("out", ops.convert("out", ops.input("x", SHAPES["x"]), like="keys"))

    [(wanted, found)] = run_both(build)
    step = symmetric_encoding(float(np.abs(FEEDS["keys"]).max()), "uint8").scale
    inside = np.abs(wanted) < 127 * step
    assert inside.mean() > 0.9
    assert np.abs(wanted - found)[inside].max() <= 0.51 * step


def test_lookup_gives_a_row_with_its_own_scale() -> None:
    def build(ops: Ops[Any]) -> None:
        best = ops.argmax("best", ops.input("line", SHAPES["line"]))
        ops.output("row", ops.lookup("row", "table", best))

    [(wanted, found)] = run_both(build)
    assert wanted.shape == (1, WIDTH)
    assert np.allclose(wanted, WEIGHTS.tables["table"].real(FEEDS["line"].argmax(axis=1)), atol=1e-6)
    assert sqnr_db(wanted, found) > SIXTEEN_BITS


def test_argmax_twice_gives_the_two_best() -> None:
    def build(ops: Ops[Any]) -> None:
        line = ops.input("line", SHAPES["line"])
        first = ops.argmax("first", line)
        second = ops.argmax("second", ops.exclude("rest", line, first))
        ops.output("both", ops.concat("both", [first, second], 0))

    [(wanted, found)] = run_both(build)
    assert found.dtype == np.int32
    assert found.tolist() == np.argsort(-FEEDS["line"][0])[:2].tolist() == wanted.tolist()


@pytest.mark.parametrize("places", [(3, 70_000), (70_001, 5), (65_535, 65_536), (89_999, 0)])
def test_argmax_over_a_long_axis_is_split(places: tuple[int, int]) -> None:
    width = 90_000
    assert width > ARGMAX_LIMIT
    ops = QdqOps("graph", WEIGHTS, {"long": encoding_from_range(0.0, 1.0, "uint16")})
    line = ops.input("long", (1, width))
    first = ops.argmax("first", line)
    ops.output("first", first)
    ops.output("second", ops.argmax("second", ops.exclude("rest", line, first)))
    assert lint(ops.model()) == []
    values = GENERATOR.integers(0, 60_000, (1, width)).astype(np.uint16)
    values[0, places[0]], values[0, places[1]] = 65_000, 64_000
    found = ReferenceSession(ops.model().SerializeToString()).run({"long": values})
    assert (int(found["first"][0]), int(found["second"][0])) == places


def test_equal_maxima_give_the_first_index_across_slices() -> None:
    ops = QdqOps("graph", WEIGHTS, {"long": encoding_from_range(0.0, 1.0, "uint16")})
    ops.output("first", ops.argmax("first", ops.input("long", (1, 70_000))))
    values = np.zeros((1, 70_000), np.uint16)
    values[0, [10, 69_000]] = 9
    found = ReferenceSession(ops.model().SerializeToString()).run({"long": values})
    assert found["first"].tolist() == [10]


def test_outputs_are_integers_and_carry_their_encodings() -> None:
    ops = emitted(result_of(ONE_INPUT["linear4"]))
    assert ops.model().graph.node[-1].op_type == "QuantizeLinear"
    [output] = ops.spec().outputs
    assert (output.name, output.shape, output.dtype) == ("out", (ROWS, OUT), "uint16")
    assert output.encoding == encodings_of(result_of(ONE_INPUT["linear4"]))["out"]


def test_the_same_network_gives_the_same_bytes() -> None:
    build = result_of(ONE_INPUT["gelu"])
    assert emitted(build).model().SerializeToString() == emitted(build).model().SerializeToString()


@pytest.mark.parametrize("weight", ["w4", "blocks"])
def test_a_weight_used_twice_is_stored_once(weight: str) -> None:
    def build(ops: Ops[Any]) -> None:
        ops.output("a", ops.linear("a", ops.input("x", SHAPES["x"]), weight))
        ops.output("b", ops.linear("b", ops.input("y", SHAPES["y"]), weight))

    names = [tensor.name for tensor in emitted(build).model().graph.initializer]
    assert len(names) == len(set(names))
    assert names.count(weight) == 1


def test_a_missing_range_is_named() -> None:
    ops = QdqOps("graph", WEIGHTS, {"x": encoding_from_range(-1.0, 1.0, "uint16")})
    with pytest.raises(ValueError, match="graph graph: tensor out has no calibrated range"):
        ops.linear("out", ops.input("x", SHAPES["x"]), "w4")


def test_parts_on_different_grids_are_not_joined() -> None:
    def build(ops: Ops[Any]) -> None:
        x, y = ops.input("x", SHAPES["x"]), ops.input("y", SHAPES["y"])
        ops.output("out", ops.concat("out", [x, y], 1))

    with pytest.raises(ValueError, match="concat out: y and x differ in encoding; convert them first"):
        emitted(build)


def test_an_output_keeps_the_name_it_was_made_with() -> None:
    ops = QdqOps("graph", WEIGHTS, {"x": encoding_from_range(-1.0, 1.0, "uint16")})
    with pytest.raises(ValueError, match="output other was made with the name x"):
        ops.output("other", ops.input("x", SHAPES["x"]))


def test_names_are_unique() -> None:
    def build(ops: Ops[Any]) -> None:
        x = ops.input("x", SHAPES["x"])
        ops.scale("out", x, 0.5)
        ops.output("out", ops.scale("out", x, 0.5))

    with pytest.raises(ValueError, match="two tensors are called out"):
        emitted(build)


def test_one_name_for_two_constants_is_refused() -> None:
    ops = QdqOps("graph", WEIGHTS, {name: encoding_from_range(-1.0, 1.0, "uint16") for name in ("x", "norm", "out")})
    ops.scale("norm", ops.input("x", SHAPES["x"]), 0.5)
    with pytest.raises(ValueError, match="two tensors are called norm"):
        ops.rms_norm("out", ops.input("x", SHAPES["x"]), "norm", 1e-6)


def test_a_float_weight_is_refused() -> None:
    weights = Weights({"w": np.zeros((OUT, WIDTH), np.float32)}, {}, {})
    ops = QdqOps("graph", weights, {"x": encoding_from_range(-1.0, 1.0, "uint16")})
    with pytest.raises(ValueError, match="weight w is in float"):
        ops.linear("out", ops.input("x", SHAPES["x"]), "w")
