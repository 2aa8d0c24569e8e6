"""Stage `compile` on small stand-ins for the converted graphs, through the real compiler and emulator."""

from pathlib import Path

import msgspec
import numpy as np
import onnx
import pytest
from onnx import TensorProto

from hyco_export.core.artifact import file_digest
from hyco_export.core.device_spec import GraphSpec, HeadSpec, SlmSpec
from hyco_export.core.files import write_json
from hyco_export.core.golden import write_samples
from hyco_export.core.handoff import HandoffSpec
from hyco_export.core.recipe import CompileGates
from hyco_export.core.recipe_loading import embedded_recipe, load_recipe
from hyco_export.core.targets import TARGETS
from hyco_export.errors import ArtifactError, CompileError, GateError
from hyco_export.graph.io_spec import read_io_spec
from hyco_export.graph.parity import ParityReport, ReferenceSession
from hyco_export.graph.qnn_process import ContextInfo
from hyco_export.graph.smaller_binaries import find_compiler
from hyco_export.stages import compile as stage
from hyco_export.stages.compile import build
from hyco_export.stages.declarations import Silent
from hyco_export.stages.table import COMPILE_STAGE, CompileConfig, compile_config
from tests.support.qdq_builder import QdqBuilder, two_layer_mlp

SM8850 = CompileConfig(TARGETS["sm8850"], CompileGates(), "test")


def best_of_mlp(seed: int = 3) -> QdqBuilder:
    """The MLP with the place of each row's largest element as its only output: ids, like the head's."""
    mlp = two_layer_mlp(seed=seed)
    (value,) = mlp.outputs
    mlp.outputs.clear()
    mlp.node("DequantizeLinear", ["y", "y_scale", "y_zero"], ["y_real"])
    mlp.node("ArgMax", ["y_real"], ["wide"], axis=-1, keepdims=0)
    mlp.node("Cast", ["wide"], ["chain"], to=TensorProto.INT32)
    mlp.plain_output("chain", (value.type.tensor_type.shape.dim[0].dim_value,))
    return mlp


def save(build: QdqBuilder, folder: Path, name: str) -> GraphSpec:
    folder.mkdir(exist_ok=True)
    path = build.save(folder / f"{name}.onnx")
    return read_io_spec(onnx.load(path), name)


def feeds(count: int, seed: int) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(seed)
    return [{"x": rng.integers(0, 65536, (4, 32)).astype(np.uint16)} for _ in range(count)]


def head_spec(graph: GraphSpec) -> HeadSpec:
    handoff = HandoffSpec(hidden=8, window=4, hidden_norm="post", kv={}, encodings={})
    return HeadSpec(4, 2, 100, "keep", "verifier", handoff, {}, {}, -100.0, graph)


def slm_spec(tree: GraphSpec, prefill: GraphSpec) -> SlmSpec:
    return SlmSpec(4, 4, 100, "keep", 32, 0, {}, {}, {}, (), -100.0, tree, prefill)


@pytest.fixture
def inputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    """The two converted artifacts; the SLM's float twin is its own QDQ graph."""
    head, slm = tmp_path / "convert-head", tmp_path / "convert-slm"
    write_json(head / "head.json", head_spec(save(best_of_mlp(), head, "head")))
    write_samples(head / "head_samples.safetensors", {"head": feeds(3, 0)})
    tree = save(two_layer_mlp(seed=1), slm, "slm_tree")
    prefill = save(two_layer_mlp(seed=2), slm, "slm_prefill")
    write_json(slm / "slm.json", slm_spec(tree, prefill))
    write_samples(slm / "slm_samples.safetensors", {"slm_tree": feeds(2, 1), "slm_prefill": feeds(2, 2)})
    (slm / "slm_weights.safetensors").write_bytes(b"of the float twin")
    monkeypatch.setattr("hyco_export.stages.compile.open_torch_slm", float_twins)
    return {"convert-head": head, "convert-slm": slm}


def float_twins(folder: Path):
    from hyco_export.models.slm.static_pass import SlmSessions

    return SlmSessions(ReferenceSession(folder / "slm_tree.onnx"), ReferenceSession(folder / "slm_prefill.onnx"))


def out_dir(tmp_path: Path, name: str = "out") -> Path:
    folder = tmp_path / ".build" / name
    folder.mkdir(parents=True)
    return folder


def test_all_graphs_are_compiled_read_back_and_compared(inputs: dict[str, Path], tmp_path: Path) -> None:
    out = out_dir(tmp_path)
    metrics = build(SM8850, inputs, out, Silent())
    names = sorted(path.name for path in out.iterdir())
    assert names == [
        "contexts.json",
        "head_ctx.onnx",
        "head_ctx_qnn.bin",
        "parity.json",
        "slm_prefill_ctx.onnx",
        "slm_prefill_ctx_qnn.bin",
        "slm_tree_ctx.onnx",
        "slm_tree_ctx_qnn.bin",
    ]
    assert metrics["target"] == "sm8850: Snapdragon 8 Elite Gen 5, Hexagon v81"
    tree = metrics["graphs"]["slm_tree"]
    assert (tree["htp_arch"], tree["soc_model"], tree["optimisation_level"], tree["feeds"]) == (81, 87, 3, 2)
    assert tree["sha256"] == file_digest(out / "slm_tree_ctx_qnn.bin")
    assert tree["peak_rss_mb"] > 50 and tree["binary_mb"] > 0
    assert tree["parity"]["y"]["sqnr_db"] > 60
    assert metrics["graphs"]["head"]["parity"] == {"chain": {"equal_share": 1.0}}
    reports = msgspec.json.decode((out / "parity.json").read_bytes(), type=dict[str, ParityReport])
    assert set(reports) == {"head", "slm_tree", "slm_prefill"} and all(report.passed for report in reports.values())


def test_a_recipe_can_leave_the_emulator_out_and_the_metrics_say_so(inputs: dict[str, Path], tmp_path: Path) -> None:
    unproved = CompileConfig(TARGETS["sm8850"], CompileGates(emulated_feeds=0), "test")
    out = out_dir(tmp_path)
    graphs = build(unproved, inputs, out, Silent())["graphs"]
    assert [(graph["feeds"], graph["parity"]) for graph in graphs.values()] == [(0, "not emulated")] * 3
    assert (out / "parity.json").read_text() == "{}"


def narrow_slm(inputs: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """SLM graphs whose `up` has 2-bit integers; the head's weight of that name keeps its 4 bits."""
    for name, rows in (("slm_tree", 4), ("slm_prefill", 4)):
        save(two_layer_mlp(rows, seed=1, limits=(-2, 1)), inputs["convert-slm"], name)
    monkeypatch.setattr(stage, "linears_of_width", lambda path, bits: ("elsewhere", "up") if bits == 2 else ())


TWO_BIT = CompileConfig(TARGETS["sm8850"], CompileGates(two_bit_weights=True, shared_binary=True), "test", True)


@pytest.mark.slow
@pytest.mark.skipif(find_compiler() is None, reason="no C compiler")
def test_2_bit_weights_and_a_shared_binary_where_the_recipe_asks(
    inputs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    narrow_slm(inputs, monkeypatch)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    out = out_dir(tmp_path)
    metrics = build(TWO_BIT, inputs, out, Silent())
    graphs = metrics["graphs"]
    assert [graphs[name].get("two_bit_weights") for name in ("head", "slm_tree", "slm_prefill")] == [None, 1, 1]
    shared = metrics["slm_shared"]
    assert shared["separate_mb"] == round(graphs["slm_tree"]["binary_mb"] + graphs["slm_prefill"]["binary_mb"], 3)
    assert shared["saved_mb"] == pytest.approx(shared["separate_mb"] - shared["binary_mb"], abs=0.002)
    assert shared["sha256"] == file_digest(out / "slm_tree_shared_ctx_qnn.bin")
    contexts = msgspec.json.decode((out / "contexts.json").read_bytes(), type=dict[str, ContextInfo])
    assert len(contexts["slm_shared"].graphs) == 2 and len(contexts["slm_tree"].graphs) == 1


def test_without_a_compiler_2_bit_weights_take_4_bits_and_it_is_said(
    inputs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    narrow_slm(inputs, monkeypatch)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("hyco_export.graph.smaller_binaries.find_compiler", lambda: None)
    notes: list[str] = []

    class Noted(Silent):
        def note(self, text: str) -> None:
            notes.append(text)

    only = CompileConfig(TARGETS["sm8850"], CompileGates(two_bit_weights=True), "test")
    metrics = build(only, inputs, out_dir(tmp_path), Noted())
    assert any(note.startswith("2-bit weights take 4 bits in the binary: no C compiler was found") for note in notes)
    assert "two_bit_weights" not in metrics["graphs"]["slm_tree"] and "slm_shared" not in metrics


def test_a_compiler_that_appears_makes_the_artifact_stale(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = load_recipe(embedded_recipe())
    asked = msgspec.structs.replace(recipe, compile=CompileGates(two_bit_weights=True))
    found = {}
    for command in ("cc", None):
        monkeypatch.setattr("hyco_export.graph.smaller_binaries.find_compiler", lambda command=command: command)
        found[command] = (compile_config(recipe), compile_config(asked))
    assert found["cc"][0] == found[None][0] and found["cc"][1] != found[None][1]


@pytest.mark.slow
def test_binaries_are_the_same_in_every_run(inputs: dict[str, Path], tmp_path: Path) -> None:
    first, second = out_dir(tmp_path, "a"), out_dir(tmp_path, "b")
    build(SM8850, inputs, first, Silent())
    build(SM8850, inputs, second, Silent())
    compared = [path.name for path in first.iterdir() if path.suffix in (".bin", ".onnx")]
    assert len(compared) == 6
    assert all(file_digest(first / name) == file_digest(second / name) for name in compared)


def test_a_limit_that_is_not_kept_stops_the_stage(inputs: dict[str, Path], tmp_path: Path) -> None:
    gates = CompileGates(output_range_share=1e-9, max_outside_share=0.0)
    with pytest.raises(GateError, match=r"slm_tree: output y of the compiled graph is not the QDQ graph's: .* outside"):
        build(CompileConfig(TARGETS["sm8850"], gates, "test"), inputs, out_dir(tmp_path), Silent())


def test_a_graph_that_is_not_the_described_one_is_refused(inputs: dict[str, Path], tmp_path: Path) -> None:
    save(two_layer_mlp(rows=5), inputs["convert-head"], "head")
    with pytest.raises(CompileError, match=r"head\.onnx is not the graph that its JSON describes: input x is uint16"):
        build(SM8850, inputs, out_dir(tmp_path), Silent())


def test_a_graph_that_the_npu_computes_wrongly_is_refused(inputs: dict[str, Path], tmp_path: Path) -> None:
    bare = best_of_mlp()
    del next(node for node in bare.nodes if node.input[0] == "up").input[2]
    save(bare, inputs["convert-head"], "head")
    with pytest.raises(CompileError, match=r"head\.onnx breaks 1 rule.* int4-zero-point at DequantizeLinear_up_real"):
        build(SM8850, inputs, out_dir(tmp_path), Silent())


def test_missing_artifacts_are_named(inputs: dict[str, Path], tmp_path: Path) -> None:
    (inputs["convert-slm"] / "slm.json").unlink()
    with pytest.raises(ArtifactError, match=r"slm\.json"):
        build(SM8850, inputs, out_dir(tmp_path), Silent())


def test_the_target_is_part_of_the_key_and_of_the_folder() -> None:
    recipe = load_recipe(embedded_recipe())
    other = msgspec.structs.replace(recipe, target="sm8750")
    assert compile_config(recipe) != compile_config(other)
    assert compile_config(other).target == TARGETS["sm8750"]
    assert COMPILE_STAGE.per_target and COMPILE_STAGE.sources(recipe) == {}
