"""`convert-slm` on unquantised checkpoints: figures, proofs, and what stops it."""

import json
from pathlib import Path

import msgspec
import numpy as np
import pytest

from hyco_export.core.device_spec import SlmSpec, read_spec
from hyco_export.core.network.host import read_attention_sink
from hyco_export.core.network.weight_files import read_slm
from hyco_export.core.recipe import Calibration, SlmGraph, SlmWeights
from hyco_export.core.tables import TABLES_FILE, HostTables
from hyco_export.device.slm import GraphSlm
from hyco_export.errors import CheckpointError, GateError
from hyco_export.graph.parity import ReferenceSession
from hyco_export.models.slm import reference_weights
from hyco_export.stages import convert_slm
from hyco_export.stages.declarations import Silent
from hyco_export.stages.table import ConvertSlmConfig
from tests.stages.test_convert_slm import FILES, make_inputs
from tests.support.float_slm import gemma3_config, llama_config, qwen3_config, save_float_slm, tied
from tests.support.packed_slm import slm_config

MODELS = {
    "gemma3": gemma3_config,
    "gemma4": lambda: tied(slm_config()),
    "qwen3": qwen3_config,
    "llama": llama_config,
}


def config(bits: int) -> ConvertSlmConfig:
    graph = SlmGraph(rows=6, prefill_rows=8, ring=12, sliding_ring=8, weights=SlmWeights(bits=bits))
    return ConvertSlmConfig(graph, Calibration(), sequence_limit=40)


def float_inputs(root: Path, model: str = "gemma3") -> dict[str, Path]:
    inputs = make_inputs(root)
    inputs["slm"] = save_float_slm(root / "float", MODELS[model]())
    return inputs


def build(inputs: dict[str, Path], out_dir: Path, bits: int = 8) -> dict:
    out_dir.mkdir()
    return convert_slm.build(config(bits), inputs, out_dir, Silent())


@pytest.mark.parametrize("model", MODELS)
def test_eight_bits_agree_with_the_unrounded_model(tmp_path: Path, model: str) -> None:
    inputs = float_inputs(tmp_path, model)
    metrics = build(inputs, tmp_path / "out")
    assert {path.name for path in (tmp_path / "out").iterdir() if path.is_file()} == FILES
    assert all(value < 1e-3 for value in metrics["parity_in_std"].values())
    done, count = metrics["tensors_equal"].split(" of ")
    assert done == count
    assert int(count) > 100
    assert metrics["top1_agreement_unrounded"] > 0.9
    _, weights = read_slm(tmp_path / "out" / "slm_weights.safetensors")
    assert {matrix.bits for matrix in weights.integer_matrices().values()} == {8}


def test_a_stored_opening_is_never_run(tmp_path: Path) -> None:
    inputs = float_inputs(tmp_path)
    answers = inputs["capture"] / "answers.jsonl"
    lines = [json.loads(line) for line in answers.read_text().splitlines()]
    for line in lines:
        line["prompt_ids"][0] = 2
    answers.write_text("".join(json.dumps(line) + "\n" for line in lines))
    stored = msgspec.structs.replace(config(8), graph=msgspec.structs.replace(config(8).graph, stored_opening=True))
    (tmp_path / "out").mkdir()
    metrics = convert_slm.build(stored, inputs, tmp_path / "out", Silent())
    assert metrics["top1_agreement_unrounded"] > 0.9
    spec = read_spec(tmp_path / "out" / "slm.json", SlmSpec)
    rows = read_attention_sink(tmp_path / "out" / "slm_opening.safetensors")
    assert spec.opening_token == 2
    assert set(rows) == {f"{kind}.{index}" for kind in "kv" for index in range(5)}

    ran = open_device(spec, tmp_path / "out", {})
    copied = open_device(spec, tmp_path / "out", rows)
    tokens = np.array(lines[-1]["prompt_ids"] + lines[-1]["answer_ids"])
    for slm in (ran, copied):
        slm.prefill(tokens)
        assert slm.length == len(tokens)
    wanted, found = (slm.tree_pass(np.array([5]), np.array([-1])) for slm in (ran, copied))
    assert np.abs(wanted - found).max() < 0.2  # of log-probabilities: the same text, one token in other roundings
    other = open_device(spec, tmp_path / "out", rows)
    other.prefill(tokens[1:])  # another beginning: nothing is copied
    assert other.length == len(tokens) - 1


def open_device(spec: SlmSpec, folder: Path, sink: dict[str, np.ndarray]) -> GraphSlm:
    tree, prefill = (ReferenceSession(folder / f"{name}.onnx") for name in ("slm_tree", "slm_prefill"))
    return GraphSlm(spec, HostTables(folder / TABLES_FILE), tree, prefill, sink)


def test_four_bits_agree_less(tmp_path: Path) -> None:
    inputs = float_inputs(tmp_path)
    metrics = build(inputs, tmp_path / "out", bits=4)
    assert metrics["top1_agreement"] > metrics["top1_agreement_unrounded"]
    _, weights = read_slm(tmp_path / "out" / "slm_weights.safetensors")
    bits = {name: matrix.bits for name, matrix in weights.integer_matrices().items()}
    assert bits.pop("lm_head") == 8
    assert set(bits.values()) == {4}


def test_a_wrongly_rounded_weight_stops_the_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nearest = reference_weights.nearest

    def moved(weight: np.ndarray, *rest: object) -> object:
        return nearest(weight + np.float32(0.02), *rest)

    monkeypatch.setattr(reference_weights, "nearest", moved)
    with pytest.raises(GateError, match=r"integers of .* differs from the checkpoint in"):
        build(float_inputs(tmp_path), tmp_path / "out")


def test_a_scale_outside_the_search_is_seen() -> None:
    from hyco_export.core.network.weights import IntegerMatrix

    weight = np.array([[1.27, -0.3]], np.float32)
    right = reference_weights.nearest(
        weight, IntegerMatrix(np.zeros((1, 2), np.int8), np.float32([0.01]), 8), (0.6, 1.0)
    )
    np.testing.assert_array_equal(right.integers, [[127, -30]])
    np.testing.assert_allclose(right.scales, [0.01])
    wide = reference_weights.nearest(
        weight, IntegerMatrix(np.zeros((1, 2), np.int8), np.float32([0.02]), 8), (0.6, 1.0)
    )
    assert wide.scales[0] != np.float32(0.02)


def test_check_wants_widths_for_floats_alone(tmp_path: Path) -> None:
    inputs = float_inputs(tmp_path)
    convert_slm.check(config(4), {"slm": inputs["slm"]})
    plain = ConvertSlmConfig(SlmGraph(rows=6, ring=12, sliding_ring=8), Calibration(), sequence_limit=40)
    with pytest.raises(CheckpointError, match="is not quantised"):
        convert_slm.check(plain, {"slm": inputs["slm"]})
