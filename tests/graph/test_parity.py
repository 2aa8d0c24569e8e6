"""Parity measures against closed forms, the gate's edges, and the CPU reference, which runs a graph as written."""

from collections.abc import Mapping
from pathlib import Path

import msgspec
import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import numpy_helper

from hyco_export.core import numerics
from hyco_export.core.device_spec import GraphSpec, TensorSpec
from hyco_export.core.encodings import Encoding
from hyco_export.errors import CompileError
from hyco_export.graph import parity
from hyco_export.graph.parity import ParityLimits, ParityReport, ReferenceSession, compare_sessions
from tests.support.qdq_builder import QdqBuilder, random_linear

GRID = Encoding("uint16", 0.001, 32768)
SPEC = GraphSpec("g", (), (TensorSpec("y", (2, 3), "uint16", GRID), TensorSpec("ids", (4,), "int32")))


class Scripted:
    """A session that gives what it was told, one entry a run."""

    def __init__(self, *answers: Mapping[str, np.ndarray]) -> None:
        self.answers = list(answers)

    def run(self, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        return dict(self.answers.pop(0))

    def close(self) -> None:
        pass


def answer(y_offset: int = 0, ids: tuple[int, ...] = (1, 2, 3, 4)) -> dict[str, np.ndarray]:
    y = np.array([[30000, 31000, 32000], [33000, 34000, 35000]], np.uint16)
    y[0, 0] += y_offset
    return {"y": y, "ids": np.array(ids, np.int32)}


def test_sqnr_of_a_tenth_of_the_amplitude_is_20_db() -> None:
    signal = np.ones(100)
    assert numerics.sqnr_db(signal, signal * 1.1) == pytest.approx(20.0)


def test_sqnr_has_finite_ends() -> None:
    assert numerics.sqnr_db(np.ones(3), np.ones(3)) == numerics.EXACT_DB
    assert numerics.sqnr_db(np.zeros(3), np.ones(3)) == -numerics.EXACT_DB


def test_elements_are_outside_beyond_the_tolerance() -> None:
    reference = np.array([0.0, 100.0, 50.0, 10.0])
    candidate = reference + np.array([0.4, 0.41, -0.4, -0.5])
    assert parity.outside_share(reference, candidate, tolerance=0.4) == 0.5


def test_an_element_nearer_to_the_float_result_is_inside() -> None:
    truth, reference = np.array([0.0, 1.0]), np.array([0.5, 1.0])
    assert parity.outside_share(reference, np.array([-0.5, 1.0]), 0.01, truth) == 0.0  # far from it, no worse than it
    assert parity.outside_share(reference, np.array([-0.51, 1.0]), 0.01, truth) == 0.5
    assert parity.outside_share(reference, np.array([-0.5, 1.0]), 0.01) == 0.5


def test_equal_sessions_are_exact() -> None:
    report = compare_sessions(Scripted(answer()), Scripted(answer()), SPEC, [{}])
    y, ids = report.outputs
    assert (y.sqnr_db, y.max_abs, y.max_steps, y.equal_share) == (numerics.EXACT_DB, 0.0, 0, 1.0)
    assert ids.max_steps is None and report.passed


def test_a_difference_is_told_in_units_steps_and_share() -> None:
    report = compare_sessions(Scripted(answer(), answer()), Scripted(answer(), answer(y_offset=20)), SPEC, [{}, {}])
    y = report.outputs[0]
    assert report.runs == 2
    assert (y.max_steps, y.max_abs) == (20, pytest.approx(0.02))
    assert y.range_share == pytest.approx(20 / 5000)
    assert y.equal_share == pytest.approx(11 / 12)


def test_a_large_difference_fails_the_report() -> None:
    report = compare_sessions(Scripted(answer()), Scripted(answer(y_offset=25)), SPEC, [{}])
    assert report.outputs[0].outside_share == pytest.approx(1 / 6)
    assert not report.outputs[0].passed and not report.passed


def test_a_tolerated_share_of_large_differences_passes() -> None:
    limits = ParityLimits(max_outside_share=0.2)
    assert compare_sessions(Scripted(answer()), Scripted(answer(y_offset=25)), SPEC, [{}], limits).passed


def test_one_step_of_a_coarse_grid_passes() -> None:
    # an 8-bit rounding that falls the other way is 1/255 of the grid, more than 0.004 of a narrower range
    spec = GraphSpec("g", (), (TensorSpec("k", (2,), "uint8", Encoding("uint8", 0.5, 128)),))
    left, right = {"k": np.array([100, 150], np.uint8)}, {"k": np.array([101, 150], np.uint8)}
    assert compare_sessions(Scripted(left), Scripted(right), spec, [{}]).passed
    right["k"][0] = 102
    left["k"][0] = 100
    assert not compare_sessions(Scripted(left), Scripted(right), spec, [{}]).passed


def test_the_float_network_excuses_what_is_nearer_to_it() -> None:
    report = compare_sessions(
        Scripted(answer()), Scripted(answer(y_offset=25)), SPEC, [{}], float_session=Scripted(answer(y_offset=20))
    )
    y, ids = report.outputs
    assert y.passed and y.float_sqnr_db > y.reference_float_sqnr_db
    assert ids.float_sqnr_db is None


def test_ids_must_be_equal_up_to_the_share_given() -> None:
    def report(share: float) -> ParityReport:
        limits = ParityLimits(min_equal_share=share)
        return compare_sessions(Scripted(answer()), Scripted(answer(ids=(1, 2, 3, 9))), SPEC, [{}], limits)

    assert report(0.75).passed
    assert not report(0.76).passed


def test_no_feeds_prove_nothing() -> None:
    with pytest.raises(ValueError, match="no feeds to compare g on"):
        compare_sessions(Scripted(), Scripted(), SPEC, [])


def test_report_survives_json() -> None:
    report = compare_sessions(Scripted(answer()), Scripted(answer(y_offset=1)), SPEC, [{}])
    assert msgspec.json.decode(msgspec.json.encode(report), type=ParityReport) == report


def by_hand(model: onnx.ModelProto, x: np.ndarray) -> np.ndarray:
    """The two-layer MLP in numpy, grid by grid, from the graph's own constants."""
    constants = {c.name: numpy_helper.to_array(c).astype(np.float64) for c in model.graph.initializer}

    def real(name: str, integers: np.ndarray) -> np.ndarray:
        return (integers - constants[f"{name}_zero"]) * constants[f"{name}_scale"]

    def quantize(name: str, values: np.ndarray) -> np.ndarray:
        return np.clip(np.rint(values / constants[f"{name}_scale"]) + constants[f"{name}_zero"], 0, 65535)

    def weight(name: str) -> np.ndarray:
        return constants[name] * constants[f"{name}_scale"][:, None]

    h = quantize("h", real("x", x.astype(np.float64)) @ weight("up").T)
    t = quantize("t", np.tanh(real("h", h)))
    return quantize("y", real("t", t) @ weight("down").T)


def test_equals_numpy_to_a_step(mlp_model: Path, mlp_feed: dict[str, np.ndarray]) -> None:
    found = ReferenceSession(mlp_model).run(mlp_feed)["y"].astype(np.float64)
    wanted = by_hand(onnx.load(mlp_model), mlp_feed["x"])
    assert np.abs(found - wanted).max() <= 1  # float32 against float64 at a rounding edge


def test_optimised_session_is_not_a_reference() -> None:
    # with optimisations on, MatMul with a 4-bit weight becomes 8-bit compute: the reason for this module
    rng = np.random.default_rng(0)
    build = QdqBuilder()
    x = build.input("x", (4, 32), -4, 4)
    integers, scales = random_linear(rng, 48, 32)
    weight = build.weight("w", integers.T, scales, axis=1)
    build.output(build.quantize(build.node("MatMul", [build.real(x), weight], ["product"]), "y", (4, 48), -8, 8))
    model = build.model().SerializeToString()
    feed = {"x": rng.integers(0, 65536, (4, 32)).astype(np.uint16)}
    optimised = ort.InferenceSession(model, providers=["CPUExecutionProvider"]).run(None, feed)[0]
    plain = ReferenceSession(model).run(feed)["y"]
    assert y_sqnr_db(plain, optimised) < 60  # 48 dB seen


def y_sqnr_db(reference: np.ndarray, candidate: np.ndarray) -> float:
    """On a grid centred at 32,768."""
    return parity.sqnr_db(reference - 32768.0, candidate - 32768.0)


def test_knows_its_inputs_and_outputs(mlp_model: Path) -> None:
    session = ReferenceSession(mlp_model)
    assert [(t.name, t.shape, t.dtype) for t in session.inputs] == [("x", (4, 32), "uint16")]
    assert [(t.name, t.shape, t.dtype) for t in session.outputs] == [("y", (4, 32), "uint16")]
    session.close()


def test_missing_and_broken_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(CompileError, match=r"gone.onnx does not exist"):
        ReferenceSession(tmp_path / "gone.onnx")
    broken = tmp_path / "broken.onnx"
    broken.write_bytes(b"\x00nonsense")
    with pytest.raises(CompileError, match=r"ONNX Runtime cannot open .*broken.onnx"):
        ReferenceSession(broken)
