"""`convert-slm` on unquantised checkpoints: figures, proofs, and what stops it."""

from pathlib import Path

import numpy as np
import pytest
from float_slm import gemma3_config, save_float_slm, tied
from packed_slm import slm_config
from test_convert_slm import FILES, make_inputs

from hyco_export.core.network.slm_file import read_slm
from hyco_export.core.recipe import Calibration, SlmGraph, SlmWeights
from hyco_export.errors import CheckpointError, GateError
from hyco_export.nn.slm import float_truth
from hyco_export.stages import convert_slm
from hyco_export.stages.convert_slm import ConvertSlmConfig
from hyco_export.stages.stage import Silent

MODELS = {"gemma3": gemma3_config, "gemma4": lambda: tied(slm_config())}


def config(bits: int) -> ConvertSlmConfig:
    graph = SlmGraph(rows=6, prefill_rows=8, ring=12, sliding_ring=8, weights=SlmWeights(bits=bits))
    return ConvertSlmConfig(graph, Calibration(), sequence_limit=40)


def float_inputs(root: Path, model: str = "gemma3") -> dict[str, Path]:
    inputs = make_inputs(root)
    inputs["slm"] = save_float_slm(root / "float", MODELS[model]())
    return inputs


def build(inputs: dict[str, Path], out_dir: Path, bits: int = 8) -> dict:
    out_dir.mkdir()
    return convert_slm.STAGE.build(config(bits), inputs, out_dir, Silent())


@pytest.mark.parametrize("model", MODELS)
def test_eight_bits_agree_with_the_unrounded_model(tmp_path: Path, model: str) -> None:
    inputs = float_inputs(tmp_path, model)
    metrics = build(inputs, tmp_path / "out")
    assert {path.name for path in (tmp_path / "out").iterdir()} == FILES
    assert all(value < 1e-3 for value in metrics["parity_in_std"].values())
    done, count = metrics["tensors_equal"].split(" of ")
    assert done == count
    assert int(count) > 100
    assert metrics["top1_agreement_unrounded"] > 0.9
    _, weights = read_slm(tmp_path / "out" / "slm_weights.safetensors")
    assert {matrix.bits for matrix in weights.integer_matrices().values()} == {8}


def test_four_bits_agree_less(tmp_path: Path) -> None:
    inputs = float_inputs(tmp_path)
    metrics = build(inputs, tmp_path / "out", bits=4)
    assert metrics["top1_agreement"] > metrics["top1_agreement_unrounded"]
    _, weights = read_slm(tmp_path / "out" / "slm_weights.safetensors")
    bits = {name: matrix.bits for name, matrix in weights.integer_matrices().items()}
    assert bits.pop("lm_head") == 8
    assert set(bits.values()) == {4}


def test_a_wrongly_rounded_weight_stops_the_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nearest = float_truth.nearest

    def moved(weight: np.ndarray, *rest: object) -> object:
        return nearest(weight + np.float32(0.02), *rest)

    monkeypatch.setattr(float_truth, "nearest", moved)
    with pytest.raises(GateError, match=r"integers of .* differs from the checkpoint in"):
        build(float_inputs(tmp_path), tmp_path / "out")


def test_a_scale_outside_the_search_is_seen() -> None:
    from hyco_export.core.network.weights import IntegerMatrix

    weight = np.array([[1.27, -0.3]], np.float32)
    right = float_truth.nearest(weight, IntegerMatrix(np.zeros((1, 2), np.int8), np.float32([0.01]), 8), (0.6, 1.0))
    np.testing.assert_array_equal(right.integers, [[127, -30]])
    np.testing.assert_allclose(right.scales, [0.01])
    wide = float_truth.nearest(weight, IntegerMatrix(np.zeros((1, 2), np.int8), np.float32([0.02]), 8), (0.6, 1.0))
    assert wide.scales[0] != np.float32(0.02)


def test_check_wants_widths_for_floats_alone(tmp_path: Path) -> None:
    inputs = float_inputs(tmp_path)
    convert_slm.STAGE.check(config(4), {"slm": inputs["slm"]})
    plain = ConvertSlmConfig(SlmGraph(rows=6, ring=12, sliding_ring=8), Calibration(), sequence_limit=40)
    with pytest.raises(CheckpointError, match="is not quantised"):
        convert_slm.STAGE.check(plain, {"slm": inputs["slm"]})
