"""The stage as a whole on a small checkpoint: files, figures, gates, and what it refuses."""

import csv
import json
import shutil
from pathlib import Path

import msgspec
import numpy as np
import onnx
import pytest
import torch
from safetensors.numpy import load_file, save_file

from hyco_export.core.device_spec import SlmSpec, read_spec
from hyco_export.core.encodings import pack_rows
from hyco_export.core.golden import read_samples
from hyco_export.core.keepset import KEEPSET_FILE, KeepSet
from hyco_export.core.network.slm import SlmNetwork, split_weights
from hyco_export.core.network.weight_files import read_slm
from hyco_export.core.network.weights import Weights
from hyco_export.core.recipe import Calibration, SlmGraph
from hyco_export.errors import ArtifactError, CheckpointError, GateError, RecipeError
from hyco_export.graph.io_spec import read_io_spec
from hyco_export.graph.parity import ReferenceSession
from hyco_export.models.slm.static_pass import open_torch_slm
from hyco_export.stages import convert_slm
from hyco_export.stages.declarations import Silent
from hyco_export.stages.parts import slm_surgery
from hyco_export.stages.parts.slm_proofs import Pair, require_equal
from hyco_export.stages.table import ConvertSlmConfig
from tests.support.outlier_slm import plant_outlier
from tests.support.packed_slm import VOCAB, edit_config, edit_tensors, random_ids, save_packed_slm, slm_config

WIDTH = 4  # of the checkpoint's linear layers that no rule names
KEPT = np.arange(0, VOCAB, 2, dtype=np.int32)
CONFIG = ConvertSlmConfig(SlmGraph(rows=6, prefill_rows=8, ring=12, sliding_ring=8), Calibration(), sequence_limit=40)
FILES = {
    "encodings.json",
    "slm.json",
    "slm_prefill.onnx",
    "slm_samples.safetensors",
    "slm_tables.safetensors",
    "slm_tree.onnx",
    "slm_weights.safetensors",
    "sqnr.json",
}


def make_inputs(root: Path, answer_tokens: int = 24, vocab_size: int = VOCAB) -> dict[str, Path]:
    """A checkpoint, captured answers of both splits, a keep set."""
    inputs = {name: root / name for name in ("slm", "capture", "build-keepset")}
    save_packed_slm(inputs["slm"])
    for name in ("capture", "build-keepset"):
        inputs[name].mkdir()
    lines = [
        {
            "id": f"{split}-{index}",
            "split": split,
            "messages": [],
            "prompt_ids": random_ids(4, index),
            "answer_ids": random_ids(answer_tokens, 10 * index + (split == "validation")),
            "text": "",
        }
        for split in ("calibration", "validation")
        for index in range(3)
    ]
    (inputs["capture"] / "answers.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    save_file({"ids": KEPT}, inputs["build-keepset"] / KEEPSET_FILE, metadata={"vocab_size": str(vocab_size)})
    return inputs


def build(inputs: dict[str, Path], out_dir: Path, config: ConvertSlmConfig = CONFIG) -> dict:
    out_dir.mkdir()
    return convert_slm.build(config, inputs, out_dir, Silent())


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict, Path, dict[str, Path]]:
    root = tmp_path_factory.mktemp("convert")
    inputs = make_inputs(root)
    return build(inputs, root / "out"), root / "out", inputs


def test_files_and_figures(built: tuple[dict, Path, dict[str, Path]]) -> None:
    metrics, folder, _ = built
    assert {path.name for path in folder.iterdir() if path.is_file()} == FILES
    assert metrics["bytes"].keys() == FILES
    # 41 linears in the tree graph and in the weights file, 2 tables; prefill has layer 0's 9, k and v of layer 1, and
    # the projection of the per-layer embeddings; integers and scales of each
    count = 2 * (41 + 41 + 2 + 12)
    assert metrics["tensors_equal"] == f"{count} of {count}"
    assert set(metrics["parity_in_std"]) == {"plain", "wrapped", "tree", "tree_wrapped"}
    assert all(value < 1e-3 for value in metrics["parity_in_std"].values())
    assert 20.0 < metrics["sqnr_min_db"] <= metrics["sqnr_median_db"]
    assert metrics["top1_agreement"] > 0.8
    assert metrics["positions"] == 3 * 24
    json.dumps(metrics)


def test_evidence_has_a_row_for_every_judged_tensor(built: tuple[dict, Path, dict[str, Path]], tmp_path: Path) -> None:
    _, folder, inputs = built
    graph = msgspec.structs.replace(CONFIG.graph, evidence_passes=2)
    build(inputs, tmp_path / "out", msgspec.structs.replace(CONFIG, graph=graph))
    names = {path.name for path in (tmp_path / "out").iterdir() if path.is_file()}
    assert names == FILES | {"sensitivity.csv", "sensitivity.svg"}
    quality = json.loads((folder / "sqnr.json").read_text())
    lines = list(csv.DictReader((tmp_path / "out" / "sensitivity.csv").open()))
    judged = {line["tensor"]: float(line["sqnr_db"]) for line in lines if line["sqnr_db"]}
    assert judged == pytest.approx(quality["layers"], rel=1e-5)
    costs = {line["tensor"]: float(line["kl_alone_nats"]) for line in lines}
    assert max(costs, key=costs.__getitem__).startswith(("k_new", "v_new"))  # 8 bits among 16
    assert min(costs.values()) >= 0
    found = {line["tensor"]: line for line in lines}
    size = 8 * 8 + 12 * 16  # of the K rings: one head each
    for name in ("k_new.0", "v_new.1"):  # each ring in 16 bits: better, and twice as large
        assert costs[f"{name}, 16 bits"] < 0.1 * costs[name]
        assert int(found[f"{name}, 16 bits"]["ring_bytes"]) == 2 * int(found[name]["ring_bytes"])
    assert [int(found[f"k_new and v_new, {bits} bits"]["ring_bytes"]) for bits in (8, 16)] == [2 * size, 4 * size]
    assert costs["k_new and v_new, 16 bits"] < 0.01 * costs["k_new and v_new, 8 bits"]
    assert 0.5 < float(found["k_new and v_new, 8 bits"]["top1_alone"]) <= 1.0
    assert found["layers.0.scaled"]["ring_bytes"] == ""
    for name in ("slm_tree.onnx", "sqnr.json"):
        assert (tmp_path / "out" / name).read_bytes() == (folder / name).read_bytes()


def test_spec_and_graphs_agree(built: tuple[dict, Path, dict[str, Path]]) -> None:
    _, folder, _ = built
    spec = read_spec(folder / "slm.json", SlmSpec)
    assert (spec.rows, spec.prefill_rows, spec.vocab_size, spec.per_layer_width) == (6, 8, VOCAB, 20)
    assert spec.keepset_digest == KeepSet(KEPT, VOCAB).digest
    assert [layer.index for layer in spec.layers] == [0, 1]
    for graph in (spec.tree, spec.prefill):
        assert read_io_spec(onnx.load(folder / f"{graph.name}.onnx"), graph.name) == graph
    grids = json.loads((folder / "encodings.json").read_text())
    assert grids["k.1"] == {"dtype": "uint8", "scale": spec.tree.input("k.1").encoding.scale, "zero_point": 128}


def test_samples_feed_both_graphs(built: tuple[dict, Path, dict[str, Path]]) -> None:
    _, folder, _ = built
    samples = read_samples(folder / "slm_samples.safetensors")
    assert {name: len(feeds) for name, feeds in samples.items()} == {"slm_tree": 3, "slm_prefill": 3}
    for name, feeds in samples.items():
        session = ReferenceSession(folder / f"{name}.onnx")
        outputs = [session.run(feed) for feed in feeds]
        assert not np.array_equal(outputs[0]["k_new.1"], outputs[1]["k_new.1"])


def test_the_same_inputs_give_the_same_bytes(built: tuple[dict, Path, dict[str, Path]], tmp_path: Path) -> None:
    _, folder, inputs = built
    build(inputs, tmp_path / "again")
    for name in FILES:
        assert (tmp_path / "again" / name).read_bytes() == (folder / name).read_bytes(), name


def test_a_killed_build_goes_on_to_the_same_bytes(
    built: tuple[dict, Path, dict[str, Path]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hyco_export.models.slm.calibration import CalibrationMemory
    from hyco_export.models.slm.static_pass import FloatSlm

    _, folder, inputs = built
    out_dir, keep, tree, passes = tmp_path / "out", CalibrationMemory.keep, FloatSlm.tree, []

    def kept_then_killed(self, observer, sequences):
        keep(self, observer, sequences)
        if sequences == 2:
            raise KeyboardInterrupt

    def counted(self, feeds, observe=None):
        passes.append(observe)
        return tree(self, feeds, observe) if observe else tree(self, feeds)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(CalibrationMemory, "keep", kept_then_killed)
        build(inputs, out_dir)
    weights = out_dir / "slm_weights.safetensors"
    written = weights.stat().st_mtime_ns
    monkeypatch.setattr(FloatSlm, "tree", counted)
    convert_slm.build(CONFIG, inputs, out_dir, Silent())
    assert weights.stat().st_mtime_ns == written  # surgery is not done again
    calibrating = [observe for observe in passes if type(observe).__name__ == "RangeObserver"]
    assert len(calibrating) == 4  # the third sequence of 28 tokens only
    for name in FILES:
        assert (out_dir / name).read_bytes() == (folder / name).read_bytes(), name


def test_a_damaged_file_of_a_killed_build_is_written_again(
    built: tuple[dict, Path, dict[str, Path]], tmp_path: Path
) -> None:
    _, folder, inputs = built
    build(inputs, tmp_path / "out")
    weights = tmp_path / "out" / "slm_weights.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    convert_slm.build(CONFIG, inputs, tmp_path / "out", Silent())
    assert weights.read_bytes() == (folder / "slm_weights.safetensors").read_bytes()


def test_another_vocabulary_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="the SLM's vocabulary has 96 tokens, the keep set's 128"):
        build(make_inputs(tmp_path, vocab_size=128), tmp_path / "out")


def test_too_short_sequences_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="no captured text has 6 tokens or more"):
        build(make_inputs(tmp_path, answer_tokens=1), tmp_path / "out")


def test_check_reads_the_checkpoint(tmp_path: Path) -> None:
    inputs = make_inputs(tmp_path)
    convert_slm.check(CONFIG, {"slm": inputs["slm"]})
    (inputs["slm"] / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model\.safetensors does not exist"):
        convert_slm.check(CONFIG, {"slm": inputs["slm"]})


GATE = "model__layers__2__mlp__gate_proj"


def truncate(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def name_absent_shard(folder: Path) -> None:
    index = {"weight_map": {"model.norm.weight": "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "model.safetensors").unlink()  # which would go before the index


ODD_CHECKPOINTS = {
    "zero scales": (
        lambda folder: edit_tensors(folder, **{f"{GATE}__weight_scale": torch.zeros(80, 1)}),
        r"weight_scale: scale of row 0 is \[0\.0\], 80 rows are not finite and positive",
    ),
    "missing tensor": (lambda folder: edit_tensors(folder, **{f"{GATE}__weight": None}), "has no tensor .*gate_proj"),
    "wrong type": (
        lambda folder: edit_tensors(folder, **{f"{GATE}__weight": torch.zeros(80, 8)}),
        "gate_proj.weight is stored as F32; 2 bits are U8",
    ),
    "wrong shape": (
        lambda folder: edit_tensors(folder, model__norm__weight=torch.ones(3)),
        r"model\.norm\.weight is \[3\], the model's config asks for \[32\]",
    ),
    "truncated file": (truncate, r"model\.safetensors is cut short or damaged"),
    "absent shard": (name_absent_shard, r"model-00002-of-00002\.safetensors does not exist"),
    "wrong width": (
        lambda folder: edit_config(folder, quantization_config={"num_bits": 8, "quantize_embeddings": True}),
        r"is stored as U8; 8 bits are I8",
    ),
    "width that cannot be packed": (
        lambda folder: edit_config(folder, quantization_config={"num_bits": 3}),
        r"num_bits of \* is 3, not one of \[2, 4, 8\]",
    ),
}


@pytest.mark.parametrize("fault", ODD_CHECKPOINTS)
def test_an_odd_checkpoint_is_named_and_nothing_is_written(fault: str, tmp_path: Path) -> None:
    break_it, words = ODD_CHECKPOINTS[fault]
    inputs = make_inputs(tmp_path)
    break_it(inputs["slm"])
    with pytest.raises(CheckpointError, match=words):  # before any stage of a chain works
        convert_slm.check(CONFIG, {"slm": inputs["slm"]})
    with pytest.raises(CheckpointError, match=words):
        build(inputs, tmp_path / "out")
    assert not list((tmp_path / "out").iterdir())


@pytest.mark.parametrize("zeros", ["k_proj", "v_proj", "layer_scalar", "input_layernorm", "lm_head"])
def test_layers_of_zeros_go_through_the_stage(zeros: str, tmp_path: Path) -> None:
    inputs = make_inputs(tmp_path)
    path = inputs["slm"] / "model.safetensors"
    tensors = load_file(path)
    names = [name for name in tensors if zeros in name and name.endswith(("weight", zeros)) and "layers.1" not in name]
    assert names
    for name in names:
        found, scales = tensors[name], tensors.get(f"{name}_scale")
        if scales is None:
            tensors[name] = np.zeros_like(found)
        else:
            bits = 8 if found.dtype == np.int8 else WIDTH
            tensors[name] = pack_rows(np.zeros((len(found), found.shape[1] * (8 // bits)), np.int8), bits)
    save_file(tensors, path, metadata={"format": "pt"})
    metrics = build(inputs, tmp_path / "out")
    assert all(difference < 1e-3 for difference in metrics["parity_in_std"].values())
    assert metrics["sqnr_min_db"] > 20.0
    assert 0.0 < metrics["top1_agreement"] <= 1.0
    grids = json.loads((tmp_path / "out" / "encodings.json").read_text())
    assert all(np.isfinite(grid["scale"]) and grid["scale"] > 0 for grid in grids.values())


@pytest.mark.parametrize("intermediate", [37, 38])  # 37 and 74 inputs: no multiple of 2, no multiple of 4
def test_odd_widths_go_through_the_stage(intermediate: int, tmp_path: Path) -> None:
    inputs = make_inputs(tmp_path)
    shutil.rmtree(inputs["slm"])
    save_packed_slm(inputs["slm"], slm_config(intermediate_size=intermediate))
    metrics = build(inputs, tmp_path / "out")
    done, _, count = metrics["tensors_equal"].partition(" of ")
    assert done == count == "192"


def test_lost_parity_stops_the_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from hyco_export.models.slm import static_pass
    from hyco_export.models.slm.static_pass import FloatSlm

    tree = FloatSlm.tree

    def shifted(self, feeds, observe=static_pass.ignore):
        outputs = tree(self, feeds, observe)
        return {**outputs, "logits": outputs["logits"] + np.float32(0.01)}

    monkeypatch.setattr(FloatSlm, "tree", shifted)
    with pytest.raises(GateError, match="float parity of the SLM, plain: logits differ by"):
        build(make_inputs(tmp_path), tmp_path / "out")


def test_a_changed_weight_stops_the_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save = onnx.save

    def damage(model: onnx.ModelProto, path: Path) -> None:
        if path.name == "slm_tree.onnx":
            weight = next(t for t in model.graph.initializer if t.name == "layers.2.mlp.up_proj")
            weight.raw_data = bytes([weight.raw_data[0] ^ 1]) + weight.raw_data[1:]
        save(model, path)

    monkeypatch.setattr(onnx, "save", damage)
    wanted = r"slm_tree\.onnx: integers of layers\.2\.mlp\.up_proj differs from the checkpoint in 1 of"
    with pytest.raises(GateError, match=wanted):
        build(make_inputs(tmp_path), tmp_path / "out")


def test_missing_and_misshaped_tensors_are_named() -> None:
    original = np.zeros((2, 3))
    with pytest.raises(GateError, match="x was not written"):
        require_equal(iter([Pair("x", None, original)]))
    with pytest.raises(GateError, match=r"x has shape \[3\] instead of \[2, 3\]"):
        require_equal(iter([Pair("x", np.zeros(3), original)]))
    assert require_equal(iter([Pair("x", original, original)])) == 1


def test_tables_are_the_checkpoints_bytes(built: tuple[dict, Path, dict[str, Path]]) -> None:
    _, folder, inputs = built
    tables = load_file(folder / "slm_tables.safetensors")
    checkpoint = load_file(inputs["slm"] / "model.safetensors")
    assert np.array_equal(tables["tokens"], checkpoint["model.embed_tokens.embedding_quantized"])
    assert np.array_equal(tables["per_layer"], checkpoint["model.embed_tokens_per_layer.embedding_quantized"])


# ---- a residual stream with an outlier channel

OUTLIER = 5
SPLIT_GRAPH = msgspec.structs.replace(CONFIG.graph, evidence_passes=2, outlier_columns=0.5)  # 16 more columns at most


@pytest.fixture(scope="module")
def outlying(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict, Path, dict[str, Path]]:
    root = tmp_path_factory.mktemp("outlier")
    inputs = make_inputs(root)
    plant_outlier(inputs["slm"], OUTLIER, 3000.0)
    config = msgspec.structs.replace(CONFIG, graph=SPLIT_GRAPH)
    return build(inputs, root / "out", config), root / "out", inputs


def test_an_outlier_channel_is_split(outlying: tuple[dict, Path, dict[str, Path]], tmp_path: Path) -> None:
    metrics, folder, inputs = outlying
    assert metrics["split_channels"] == {str(OUTLIER): 16}
    assert metrics["stream_width"] == [32, 47]
    assert metrics["stream_bits_won"] == pytest.approx(2.0, abs=0.01)
    assert metrics["split_difference_in_std"] < 1e-3
    done, count = metrics["tensors_equal"].split(" of ")
    assert done == count
    network, weights = read_slm(folder / "slm_weights.safetensors")
    assert network.copies == {OUTLIER: 16}
    assert weights.matrices["layers.0.per_layer_input_gate"].integers.shape[1] == 32 + 3
    whole = build(inputs, tmp_path / "whole", msgspec.structs.replace(CONFIG, graph=no_columns()))
    assert not {"split_channels", "stream_width"} & whole.keys()
    assert metrics["sqnr_logits_db"] > whole["sqnr_logits_db"] + 3.0
    split, plain = (read_spec(each / "slm.json", SlmSpec) for each in (folder, tmp_path / "whole"))
    shapes = [[(each.name, each.shape) for each in (*spec.tree.inputs, *spec.tree.outputs)] for spec in (split, plain)]
    assert shapes[0] == shapes[1]  # the host sees nothing of it


def no_columns() -> SlmGraph:
    return msgspec.structs.replace(SPLIT_GRAPH, outlier_columns=0.0)


def test_the_evidence_says_what_the_split_wins(outlying: tuple[dict, Path, dict[str, Path]]) -> None:
    lines = {line["tensor"]: line for line in csv.DictReader((outlying[1] / "sensitivity.csv").open())}
    split, whole = (float(lines[name]["kl_alone_nats"]) for name in ("stream.split", "stream.whole"))
    assert 0 <= split < 0.5 * whole
    assert "stream.whole" in (outlying[1] / "sensitivity.svg").read_text()


def test_a_split_that_changes_the_network_stops_the_stage(
    outlying: tuple[dict, Path, dict[str, Path]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def spoil(network: SlmNetwork, weights: Weights) -> Weights:
        found = split_weights(network, weights)
        found.vectors["norm"][:] *= 1.01
        return found

    monkeypatch.setattr(slm_surgery, "split_weights", spoil)
    with pytest.raises(
        GateError, match=r"splitting outlier channels changes the SLM's logits by .* the limit is 1e-03"
    ):
        build(outlying[2], tmp_path / "out", msgspec.structs.replace(CONFIG, graph=SPLIT_GRAPH))


def test_the_torch_back_end_runs_a_split_network(outlying: tuple[dict, Path, dict[str, Path]]) -> None:
    folder = outlying[1]
    sessions = open_torch_slm(folder)
    for name, session in (("slm_tree", sessions.tree), ("slm_prefill", sessions.prefill)):
        feed = read_samples(folder / "slm_samples.safetensors")[name][0]
        graph = ReferenceSession(folder / f"{name}.onnx").run(feed)
        found = session.run(feed)
        assert found.keys() == graph.keys()
        assert np.abs(found["k_new.0"].astype(int) - graph["k_new.0"].astype(int)).max() <= 3


# ---- rings of 16 bits


def test_rings_of_16_bits(built: tuple[dict, Path, dict[str, Path]], tmp_path: Path) -> None:
    metrics, narrow, inputs = built
    graph = msgspec.structs.replace(CONFIG.graph, wide_kv=("k.*", "v.1"))
    wide = build(inputs, tmp_path / "out", msgspec.structs.replace(CONFIG, graph=graph))
    assert wide["sqnr_min_db"] > metrics["sqnr_min_db"]
    spec = read_spec(tmp_path / "out" / "slm.json", SlmSpec)
    dtypes = {each.name: each.dtype for each in (*spec.tree.inputs, *spec.tree.outputs)}
    assert {name: dtypes[name] for name in ("k.0", "v.0", "k.1", "v.1", "k_new.1", "v_new.0")} == {
        "k.0": "uint16",
        "v.0": "uint8",
        "k.1": "uint16",
        "v.1": "uint16",
        "k_new.1": "uint16",
        "v_new.0": "uint8",
    }
    files = [each / "slm_weights.safetensors" for each in (tmp_path / "out", narrow)]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_a_ring_that_does_not_exist_is_named(built: tuple[dict, Path, dict[str, Path]]) -> None:
    graph = msgspec.structs.replace(CONFIG.graph, wide_kv=("k.0", "k.7"))
    with pytest.raises(RecipeError, match=r"\$\.slm\.wide_kv: no ring is called k\.7") as caught:
        convert_slm.check(msgspec.structs.replace(CONFIG, graph=graph), built[2])
    assert "the SLM stores K/V in k.0, v.0, k.1, v.1" in caught.value.hint
