"""Two files or artifacts: what matters is named, what is equal is counted."""

from pathlib import Path

import msgspec
import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from safetensors.numpy import save_file

from hyco_export.core.artifact import Manifest, publish
from hyco_export.core.numerics import sqnr_db
from hyco_export.errors import HycoError
from hyco_export.workbench.difference import compare_files, compare_paths, layer_of
from tests.support.qdq_builder import two_layer_mlp


def artifact(folder: Path, files: dict[str, bytes], config: object = None, key: str = "k") -> Path:
    build = folder.with_name(f"{folder.name}.build")
    build.mkdir()
    for name, content in files.items():
        (build / name).write_bytes(content)
    publish(build, folder, Manifest("convert-slm", 1, key, config or {}, {}, {}, {}, {}, {}, 0.1))
    return folder


def weights() -> dict[str, np.ndarray]:
    generator = np.random.default_rng(1)
    names = [f"layers.{layer}.{part}" for layer in (2, 10) for part in ("up", "down")] + ["norm"]
    return {name: generator.normal(size=(16, 8)).astype(np.float32) for name in names}


def test_weights_are_compared_by_layer(tmp_path: Path) -> None:
    left, right = weights(), weights()
    right["layers.10.up"] = right["layers.10.up"] + np.float32(0.01)
    right["layers.10.down"][0, 0] = np.nan
    right["norm"][0, 0] += 1
    save_file(left, tmp_path / "a.safetensors")
    save_file(right, tmp_path / "b.safetensors")
    found = compare_files(tmp_path / "a.safetensors", tmp_path / "b.safetensors", "w")
    assert [layer.layer for layer in found.layers] == ["layers.10", "others"]
    tenth = found.layers[0]
    assert (tenth.tensors, tenth.changed, tenth.worst, tenth.worst_db) == (2, 2, "layers.10.down", None)
    by_name = {change.name: change for change in found.weights}
    wanted = sqnr_db(left["layers.10.up"], right["layers.10.up"])
    assert by_name["layers.10.up"].sqnr_db == pytest.approx(wanted)
    assert by_name["norm"].differing_share == pytest.approx(1 / 128)
    assert not found.tensors and not found.facts


def test_shapes_types_and_tensors_that_one_side_lacks(tmp_path: Path) -> None:
    left, right = weights(), weights()
    right["norm"] = right["norm"].astype(np.float16)
    del right["layers.2.up"]
    save_file(left, tmp_path / "a.safetensors")
    save_file(right, tmp_path / "b.safetensors")
    found = compare_files(tmp_path / "a.safetensors", tmp_path / "b.safetensors", "w")
    changes = {change.name: (change.left, change.right) for change in found.tensors}
    assert changes == {
        "stored layers.2.up": ("float32 [16, 8]", None),
        "stored norm": ("float32 [16, 8]", "float16 [16, 8]"),
    }


def test_a_graphs_encodings_are_compared(tmp_path: Path) -> None:
    left = two_layer_mlp().save(tmp_path / "a.onnx")
    model = onnx.load(left)
    scale = next(t for t in model.graph.initializer if t.name == next(
        n.input[1] for n in model.graph.node if n.op_type == "DequantizeLinear" and n.input[0] == "x"
    ))  # fmt: skip
    scale.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(scale) * np.float32(2), scale.name))
    onnx.save(model, tmp_path / "b.onnx")
    found = compare_files(left, tmp_path / "b.onnx", "graph")
    changed = {change.name: (change.left, change.right) for change in found.tensors}
    before, after = changed[scale.name]
    assert after == pytest.approx(2 * before)
    said_before, said_after = changed["input x"]
    assert said_before != said_after and "scale" in said_after
    assert not found.layers


def test_artifacts_are_compared_file_by_file(tmp_path: Path) -> None:
    left, right = weights(), weights()
    right["layers.2.up"] *= 2
    for name, tensors in (("l", left), ("r", right)):
        save_file(tensors, tmp_path / name)
    encodings = b'{"embeds": {"scale": %s, "zero_point": 3}}'
    common = {"same.txt": b"x", "other.csv": b"a"}
    a = artifact(
        tmp_path / "a",
        {**common, "w.safetensors": (tmp_path / "l").read_bytes(), "e.json": encodings % b"0.5"},
        {"rows": 32},
    )
    b = artifact(
        tmp_path / "b",
        {
            **common,
            "other.csv": b"b",
            "w.safetensors": (tmp_path / "r").read_bytes(),
            "e.json": encodings % b"0.25",
            "more.txt": b"",
        },
        {"rows": 64},
        "k2",
    )
    found = compare_paths(a, b)
    files = {file.name: file for file in found.files}
    assert set(files) == {"manifest.json", "w.safetensors", "e.json", "other.csv"}
    assert found.only_right == ("more.txt",) and not found.only_left and found.equal_files == 1
    facts = {change.name: (change.left, change.right) for change in files["manifest.json"].facts}
    assert facts == {"config.rows": (32, 64), "key": ("k", "k2")}  # no times, no hashes
    assert files["e.json"].facts[0].name == "embeds.scale"
    assert files["w.safetensors"].layers[0].layer == "layers.2"
    assert files["other.csv"].note == "bytes differ"
    assert not found.equal
    msgspec.json.encode(found)


def test_equal_artifacts_and_whole_run_folders(tmp_path: Path) -> None:
    for run in ("one", "two"):
        (tmp_path / run).mkdir()
        artifact(tmp_path / run / "capture", {"a.json": b"{}"})
        (tmp_path / run / "server.log").write_text("x")
    found = compare_paths(tmp_path / "one", tmp_path / "two")
    assert found.equal and found.equal_files == 3
    with pytest.raises(HycoError, match="a folder and a file"):
        compare_paths(tmp_path / "one", tmp_path / "two" / "server.log")


def test_layers_of_names() -> None:
    assert layer_of("model.layers.3.mlp.up_proj") == "model.layers.3"
    assert layer_of("blk.11.attn_q.weight") == "blk.11"
    assert layer_of("head/2/x") == "head/2"
    assert layer_of("norm.weight") == "others"
