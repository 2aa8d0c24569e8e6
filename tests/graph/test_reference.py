"""The CPU reference computes the QDQ graph as written."""

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import numpy_helper

from hyco_export.errors import CompileError
from hyco_export.graph import parity
from hyco_export.graph.parity import ReferenceSession
from tests.support.qdq_builder import QdqBuilder, random_linear


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
