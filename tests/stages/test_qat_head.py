"""`capture`, `qat-head` and `convert-head` in a row on a seeded family: files, metrics and what bad input gets."""

import csv
import json

import msgspec
import numpy as np
import onnx
import pytest
import torch
from safetensors.numpy import save_file

from hyco_export.core.device_spec import HeadSpec
from hyco_export.core.estimates.shapes import ROOTS_PER_SEQUENCE
from hyco_export.core.golden import read_samples
from hyco_export.core.handoff import KvShape
from hyco_export.core.keepset import read_keepset
from hyco_export.core.network.weight_files import read_head
from hyco_export.core.recipe import Calibration, Capture, HeadGraph, Qat
from hyco_export.errors import ArtifactError, GateError, RecipeError
from hyco_export.graph.parity import ReferenceSession
from hyco_export.graph.writer import read_weight
from hyco_export.models.capture import load_capture, teacher_forced
from hyco_export.models.embedding_table import find_embedding, quantized_embedding
from hyco_export.models.head import quantisers
from hyco_export.models.head.static_pass import open_torch_head
from hyco_export.models.verifier import load_verifier
from hyco_export.stages import capture, captured, convert_head, qat_head
from hyco_export.stages.declarations import Silent
from hyco_export.stages.table import CaptureConfig, ConvertHeadConfig, QatConfig
from tests.support import builders

PROMPTS = {"calibration": ("c", 4), "validation": ("v", 3)}
CAPTURE = CaptureConfig(Capture(max_new_tokens=14, validation_max_new_tokens=12), "post", "float32")
QAT = QatConfig(
    Qat(steps=6, warmup_steps=2, learning_rate=1e-3, autocast="float32", unrolled_steps=2), "float32", "post", 3, 24
)
CONVERT = ConvertHeadConfig(HeadGraph(steps=3, runner_up_steps=1, window=24), Calibration(), "post", "float32")


def write_prompts(folder):
    for split, (prefix, count) in PROMPTS.items():
        lines = [
            {
                "id": f"{prefix}{i}",
                "messages": [
                    {"role": "user", "content": builders.TEXTS[i]},
                    {"role": "assistant", "content": "not part of the prompt"},
                ],
            }
            for i in range(count)
        ]
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def write_keepset(folder, verifier, vocab_size):
    ids = np.arange(0, vocab_size, 3, dtype=np.int32)
    table = quantized_embedding(find_embedding(verifier), ids, "float32")
    tensors = {"ids": ids, "table": table.integers, "table_scale": table.scale}
    save_file(tensors, folder / "keepset.safetensors", metadata={"vocab_size": str(vocab_size)})


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run folder with all three artifacts, their metrics, and the inputs they were built from."""
    torch.set_num_threads(1)
    root = tmp_path_factory.mktemp("run")
    builders.save_family(root)
    write_prompts(root)
    stages = ("capture", "qat-head", "build-keepset", "convert-head")
    inputs = {name: root / name for name in ("verifier", "head", *stages)}
    inputs |= {split: root / f"{split}.jsonl" for split in PROMPTS}
    for stage in stages:
        inputs[stage].mkdir()
    vocab_size = load_verifier(inputs["verifier"], "float32").config.vocab_size
    write_keepset(inputs["build-keepset"], inputs["verifier"], vocab_size)
    metrics = {
        "capture": capture.build(CAPTURE, inputs, inputs["capture"], Silent()),
        "qat-head": qat_head.build(QAT, inputs, inputs["qat-head"], Silent()),
        "convert-head": convert_head.build(CONVERT, inputs, inputs["convert-head"], Silent()),
    }
    return root, inputs, metrics


def test_metrics_can_be_stored(run):
    assert len(msgspec.json.encode(run[2])) > 100


# ---- capture


def test_every_prompt_is_answered_and_captured(run):
    _, inputs, metrics = run
    answers = captured.read_answers(inputs["capture"])
    assert [(a.id, a.split) for a in answers] == [
        *((f"c{i}", "calibration") for i in range(4)),
        *((f"v{i}", "validation") for i in range(3)),
    ]
    assert metrics["capture"]["sequences"] == {"calibration": 4, "sampled": 0, "validation": 3}
    assert all(1 <= len(a.answer_ids) <= 14 for a in answers)
    assert [len(m.content) for m in answers[0].messages] == [len(builders.TEXTS[0])]  # the assistant's turn is dropped
    for split in PROMPTS:
        paths = captured.sequence_paths(inputs["capture"], split)
        of_split = captured.read_answers(inputs["capture"], split)
        assert len(paths) == len(of_split)
        for path, answer in zip(paths, of_split, strict=True):
            found = load_capture(path)
            assert found.ids.tolist() == answer.prompt_ids + answer.answer_ids
            assert found.answer_start == len(answer.prompt_ids)
    total = sum(len(a.prompt_ids) + len(a.answer_ids) for a in answers)
    assert metrics["capture"]["tokens"] == total


def test_captures_are_teacher_forced(run):
    _, inputs, _ = run
    path = captured.sequence_paths(inputs["capture"], "validation")[0]
    found = load_capture(path)
    wanted = teacher_forced(load_verifier(inputs["verifier"], "float32"), found.ids.tolist(), found.answer_start)
    torch.testing.assert_close(found.h, wanted.h)


def test_sampled_answers_train_the_head_and_nothing_else(run, tmp_path):
    _, inputs, _ = run
    more = msgspec.structs.replace(CAPTURE, capture=Capture(max_new_tokens=6, sampled_answers=2))
    metrics = capture.build(more, inputs, tmp_path, Silent())
    assert metrics["sequences"] == {"calibration": 4, "sampled": 8, "validation": 3}
    assert len(captured.training_paths(tmp_path)) == 12
    assert len(captured.sequence_paths(tmp_path, "calibration")) == 4
    sampled = captured.read_answers(tmp_path, "sampled")
    assert [answer.id for answer in sampled] == [f"c{i}" for i in range(4) for _ in range(2)]
    assert len({tuple(answer.answer_ids) for answer in sampled}) > 4  # not the greedy ones again


def test_sequences_are_cut_at_the_limit(run, tmp_path):
    _, inputs, _ = run
    longest = max(len(a.prompt_ids) for a in captured.read_answers(inputs["capture"]))
    short = msgspec.structs.replace(CAPTURE, capture=Capture(max_new_tokens=14, sequence_limit=longest + 2))
    capture.build(short, inputs, tmp_path, Silent())
    answers = captured.read_answers(tmp_path)
    assert max(len(a.prompt_ids) + len(a.answer_ids) for a in answers) == longest + 2

    (tmp_path / "again").mkdir()
    too_short = msgspec.structs.replace(CAPTURE, capture=Capture(sequence_limit=longest))
    with pytest.raises(RecipeError, match=rf"prompt has {longest} tokens, \$\.capture\.sequence_limit is {longest}"):
        capture.build(too_short, inputs, tmp_path / "again", Silent())


def test_missing_and_empty_prompt_files_are_named(run, tmp_path):
    _, inputs, _ = run
    with pytest.raises(RecipeError, match=r"\$\.data\.calibration: .*none\.jsonl does not exist"):
        capture.build(CAPTURE, {**inputs, "calibration": tmp_path / "none.jsonl"}, tmp_path, Silent())
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(RecipeError, match=r"\$\.data\.validation: .*empty\.jsonl holds no conversation"):
        capture.build(CAPTURE, {**inputs, "validation": tmp_path / "empty.jsonl"}, tmp_path, Silent())


def test_a_folder_without_captures_is_named(tmp_path):
    with pytest.raises(ArtifactError, match="holds no validation captures"):
        captured.sequence_paths(tmp_path, "validation")
    with pytest.raises(ArtifactError, match=r"answers\.jsonl cannot be read"):
        captured.read_answers(tmp_path)


# ---- qat-head


def test_agreement_is_reported_by_weights_and_depth(run):
    _, inputs, metrics = run
    report = json.loads((inputs["qat-head"] / "agreement.json").read_text())
    assert set(report["top1_agreement"]) == {"nearest", "clip-searched", "trained", "nearest-8-bit"}
    for table in (report["top1_agreement"], report["kl_nats"]):
        assert {len(depths) for depths in table.values()} == {3}
    answer_tokens = sum(len(a.answer_ids) for a in captured.read_answers(inputs["capture"], "validation"))
    assert report["positions"] == [answer_tokens - 3 * depth for depth in range(3)]  # three sequences
    assert min(report["top1_agreement"]["nearest-8-bit"]) > max(report["top1_agreement"]["nearest"])
    assert report["won_back_mean"] == pytest.approx(sum(report["won_back"]) / 3, abs=1e-3)
    assert {**report, "bytes": metrics["qat-head"]["bytes"]} == metrics["qat-head"]


def test_the_curve_has_one_line_a_step(run):
    lines = (run[1]["qat-head"] / "curve.jsonl").read_text().splitlines()
    points = [json.loads(line) for line in lines]
    assert [point["step"] for point in points] == list(range(6))
    assert points[1]["learning_rate"] == 1e-3
    assert all(point["loss"] > 0 for point in points)


def test_the_stored_head_has_all_weights_in_four_bits(run):
    stored = read_head(run[1]["qat-head"])
    assert len(stored.matrices) == 3 * 5 + 3
    assert len(stored.matrices["lm_head"].integers) == stored.architecture.vocab_size
    for matrix in stored.matrices.values():
        assert -8 <= matrix.integers.min() < matrix.integers.max() <= 7
    assert [layer.scalar for layer in stored.architecture.layers] == [1.0, 0.75, 1.0]
    assert stored.architecture.spans == {"sliding": builders.SLIDING_WINDOW + 2, "full": None}
    assert stored.architecture.kv_shape("sliding") == KvShape(2, 8)


MIXED = {"lm_head": 8, "layers.*.mlp.*": 8, "layers.1.mlp.up_proj": 4}


def with_qat(**fields):
    return msgspec.structs.replace(QAT, qat=msgspec.structs.replace(QAT.qat, **fields))


def test_overrides_that_name_nothing_are_refused_with_the_names_that_exist(run):
    with pytest.raises(RecipeError, match=r"\$\.qat\.overrides: no linear layer is called lmhead") as caught:
        qat_head.check(with_qat(overrides={"lm_head": 8, "lmhead": 8}), run[1])
    assert "layers.0.mlp.down_proj" in caught.value.hint and "lm_head" in caught.value.hint
    qat_head.check(with_qat(overrides=MIXED), run[1])


def test_layers_that_cannot_be_cut_into_blocks_are_named_before_training(run):
    with pytest.raises(RecipeError, match=r"\$\.qat\.grid: .* inputs, not a multiple of lpbq's 64") as caught:
        qat_head.check(with_qat(grid="lpbq"), run[1])
    assert "$.qat.overrides" in caught.value.hint
    qat_head.check(with_qat(grid="lpbq", overrides={"*": 8}), run[1])


@pytest.fixture(scope="module")
def mixed(run, tmp_path_factory):
    """qat-head and convert-head with blocks of 8 inputs, wide layers, and evidence; metrics by stage."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(quantisers.GRID_BLOCKS, "lpbq", 8)
        config = with_qat(split_projection=True, grid="lpbq", overrides=MIXED, evidence_sequences=2, trained_grids=True)
        inputs = {**run[1], **{name: tmp_path_factory.mktemp(name) for name in ("qat-head", "convert-head")}}
        metrics = {"qat-head": qat_head.build(config, inputs, inputs["qat-head"], Silent())}
        metrics["convert-head"] = convert_head.build(CONVERT, inputs, inputs["convert-head"], Silent())
    return inputs, metrics


def test_widths_and_blocks_reach_the_stored_head(mixed):
    stored = read_head(mixed[0]["qat-head"])
    wide = {name for name, matrix in stored.matrices.items() if matrix.bits == 8}
    mlps = {f"layers.{i}.mlp.{part}" for i in range(3) for part in ("gate_proj", "up_proj", "down_proj")}
    assert wide == (mlps | {"lm_head"}) - {"layers.1.mlp.up_proj"}
    for name, matrix in stored.matrices.items():
        assert (matrix.multipliers is None) == (name in wide)
        if matrix.multipliers is not None:
            assert matrix.block == 8
            assert matrix.multipliers.max(axis=1).tolist() == [16] * len(matrix.scales)
            assert matrix.multipliers.min() >= 1


def test_a_split_projection_is_stored_in_two_and_computed_in_two(mixed):
    stored = read_head(mixed[0]["qat-head"])
    halves = {"pre_projection.embedding", "pre_projection.state"}
    assert {name for name in stored.matrices if name.startswith("pre_projection")} == halves
    assert all(stored.matrices[name].integers.shape[1] == builders.HIDDEN for name in halves)
    names = {node.name for node in onnx.load(mixed[0]["convert-head"] / "head.onnx").graph.node}
    assert any("step1.mixed.carried" in name for name in names) and not any("step1.joined" in name for name in names)


def test_the_table_compares_both_layouts(mixed):
    table = mixed[1]["qat-head"]["kl_nats"]
    assert set(table) == {"nearest", "clip-searched", "nearest-8-bit", qat_head.CHOSEN, "trained"}
    assert sum(table[qat_head.CHOSEN]) < sum(table["clip-searched"])


def test_evidence_names_layers_and_a_suggestion(mixed):
    folder, metrics = mixed[0]["qat-head"], mixed[1]["qat-head"]
    lines = list(csv.DictReader((folder / "sensitivity.csv").open()))
    assert [line["tensor"] for line in lines if line["bits"] == "8"]
    assert {line["tensor"] for line in lines} == read_head(folder).matrices.keys()
    assert all(float(line["extra_bytes_at_8"]) == 0 for line in lines if line["bits"] == "8")
    assert "<svg" in (folder / "sensitivity.svg").read_text()
    suggestion = json.loads((folder / "suggestion.json").read_text())
    assert metrics["suggestion"] == suggestion["sentence"]
    assert suggestion["overrides"] == metrics["suggested_overrides"]
    names = [tuple(combination["layers"]) for combination in suggestion["combinations"]]
    assert (
        names == [names[-1][: len(name)] for name in names] and len(names) > 1
    )  # a greedy order, cut at several places
    assert tuple(suggestion["overrides"]) in names


def test_a_mixed_head_is_converted_and_drafts_like_its_float_twin(mixed):
    assert mixed[1]["convert-head"]["float_agreement"] >= 0.95
    graph = onnx.load(mixed[0]["convert-head"] / "head.onnx").graph
    stored = read_head(mixed[0]["qat-head"])
    constants = {tensor.name: tensor for tensor in graph.initializer}
    np.testing.assert_array_equal(
        read_weight(constants["layers.0.self_attn.q_proj"]).T, stored.matrices["layers.0.self_attn.q_proj"].integers
    )
    assert constants["layers.0.mlp.up_proj"].data_type == onnx.TensorProto.INT8


def test_a_capture_from_the_other_side_of_the_norm_is_refused_before_training(run, tmp_path):
    other = msgspec.structs.replace(QAT, hidden_norm="pre")
    with pytest.raises(GateError, match=r"come from after the verifier's final norm, \$\.models\.hidden_norm is pre"):
        qat_head.build(other, run[1], tmp_path, Silent())
    assert not (tmp_path / "head.safetensors").exists()


def test_h_from_before_the_norm_gives_the_same_head(run, tmp_path):
    inputs = {**run[1], **{name: tmp_path / name for name in ("capture", "qat-head", "convert-head")}}
    for name in ("capture", "qat-head", "convert-head"):
        inputs[name].mkdir()
    before = {"hidden_norm": "pre"}
    capture.build(msgspec.structs.replace(CAPTURE, **before), inputs, inputs["capture"], Silent())
    trained = qat_head.build(msgspec.structs.replace(QAT, **before), inputs, inputs["qat-head"], Silent())
    converted = convert_head.build(msgspec.structs.replace(CONVERT, **before), inputs, inputs["convert-head"], Silent())

    assert trained["original_predicts_verifier"] == run[2]["qat-head"]["original_predicts_verifier"]
    ours, theirs = (read_head(folder).matrices for folder in (inputs["qat-head"], run[1]["qat-head"]))
    same = [np.mean(ours[name].integers == theirs[name].integers) for name in theirs]
    assert min(same) > 0.99  # the norm is computed elsewhere and rounds differently
    spec = msgspec.json.decode((inputs["convert-head"] / "head.json").read_bytes(), type=HeadSpec)
    assert spec.handoff.hidden_norm == "pre"
    assert converted["float_agreement"] >= 0.95


# ---- convert-head


def test_the_spec_tells_everything_the_host_needs(run):
    _, inputs, _ = run
    spec = msgspec.json.decode((inputs["convert-head"] / "head.json").read_bytes(), type=HeadSpec)
    assert (spec.steps, spec.runner_up_steps, spec.handoff.window) == (3, 1, 24)
    assert spec.keepset_digest == read_keepset(inputs["build-keepset"]).digest
    assert spec.handoff.kv == {"sliding": KvShape(2, 8), "full": KvShape(1, 16)}
    assert set(spec.handoff.encodings) == {"e", "h", "k.sliding", "v.sliding", "k.full", "v.full"}
    assert [output.shape for output in spec.graph.outputs] == [(3,), (1,)]
    for name, grid in spec.handoff.encodings.items():
        assert spec.graph.input(name).encoding == grid


def test_the_graph_drafts_like_the_float_head_on_its_samples(run):
    root, inputs, metrics = run
    samples = read_samples(inputs["convert-head"] / "head_samples.safetensors")["head"]
    assert samples
    floating, integer = open_torch_head(root), ReferenceSession(inputs["convert-head"] / "head.onnx")
    same = [floating.run(feeds)["chain"] == integer.run(feeds)["chain"] for feeds in samples]
    assert np.mean(same) >= 0.9
    found = metrics["convert-head"]
    assert found["float_agreement"] >= 0.95
    assert found["positions"] <= 3 * ROOTS_PER_SEQUENCE
    assert found["original_agreement"]["positions"][0] == found["positions"]
    assert all(share < 0.05 for share in found["clipped_share"].values())


def test_a_table_of_products_drafts_like_the_plain_float_head(run, tmp_path):
    _, inputs, metrics = run
    projected = msgspec.structs.replace(CONVERT, head=msgspec.structs.replace(CONVERT.head, projected_table=True))
    found = convert_head.build(projected, inputs, tmp_path, Silent())
    assert found["float_agreement"] >= 0.9
    assert found["original_agreement"]["float_w4"] == metrics["convert-head"]["original_agreement"]["float_w4"]
    assert found["table"]["projected_sqnr_db"] > 40
    architecture = read_head(inputs["qat-head"]).architecture
    rows = len(read_keepset(inputs["build-keepset"]))
    assert found["table"]["projected_bytes"] == rows * architecture.width
    assert found["table"]["embeddings_bytes"] == rows * architecture.backbone
    assert "table" not in metrics["convert-head"]


def test_a_keep_set_of_another_vocabulary_is_named(run, tmp_path):
    _, inputs, _ = run
    vocab_size = read_head(inputs["qat-head"]).architecture.vocab_size
    write_keepset(tmp_path, inputs["verifier"], vocab_size)
    table = read_keepset(tmp_path)
    tensors = {
        "ids": table.ids,
        "table": np.zeros((len(table), 16), np.int8),
        "table_scale": np.ones(len(table), np.float32),
    }
    save_file(tensors, tmp_path / "keepset.safetensors", metadata={"vocab_size": str(vocab_size + 5)})
    with pytest.raises(ArtifactError, match=f"vocabulary of {vocab_size + 5}, the head's has {vocab_size}"):
        convert_head.build(CONVERT, {**inputs, "build-keepset": tmp_path}, tmp_path, Silent())


def test_a_run_without_converted_head_is_named(tmp_path):
    with pytest.raises(ArtifactError, match=r"head\.json is not a HeadSpec"):
        open_torch_head(tmp_path)
