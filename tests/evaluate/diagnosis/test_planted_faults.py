"""Every planted fault is named, and no other, in files and in the server; and none in a right run.

A fault in a file may show in several places; its name must be one.
"""

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper

from hyco_export.core.device_spec import HEAD_SPEC_FILE, SLM_SPEC_FILE
from hyco_export.core.keepset import KeepSet
from hyco_export.core.network.weight_files import HEAD_FILE
from hyco_export.dev.tiny.configs import train_tokenizer
from hyco_export.errors import ArtifactError, CheckpointError
from hyco_export.evaluate.connect import RunArtifacts, open_artifacts
from hyco_export.evaluate.diagnosis.diagnose import (
    Checkpoints,
    GoldenRun,
    diagnose_server,
    file_findings,
    open_golden,
    open_reference,
    published_head_findings,
    server_findings,
)
from hyco_export.evaluate.diagnosis.distributions import distribution_findings
from hyco_export.evaluate.diagnosis.drafts import golden_feeds, network_findings
from hyco_export.evaluate.diagnosis.finding import Finding
from hyco_export.evaluate.diagnosis.server_probe import probe, server_head_findings
from hyco_export.graph.writer import read_weight, weight_tensor
from hyco_export.models.capture import greedy_answer
from hyco_export.models.fused_layers import FusedStack
from hyco_export.models.golden_tree import DEPTH, golden_tree
from hyco_export.models.verifier import load_verifier
from hyco_export.protocol import acceptance, sampling
from hyco_export.protocol.wire import Handoff, ServerInfo
from hyco_export.server.assembly import open_server_engine
from hyco_export.server.engine import Engine, LocalTransport
from hyco_export.server.interfaces import Check, Prefill
from hyco_export.server.passes.cache import SlotCache
from hyco_export.server.passes.verifier import TorchVerifierSession, Verifier
from hyco_export.stages.checks import require_family
from hyco_export.stages.run_folder import RunFolder
from tests.evaluate.diagnosis.small_run import SmallRun, edit_graph, edit_json, edit_tensors, plant, verifier_of
from tests.support import builders

Served = tuple[Engine, ServerInfo]
HEAD_JSON, SLM_JSON = f"convert-head/{HEAD_SPEC_FILE}", f"convert-slm/{SLM_SPEC_FILE}"
HEAD_ONNX, SLM_ONNX = "convert-head/head.onnx", "convert-slm/slm_tree.onnx"
TRAINED, KEPT = f"qat-head/{HEAD_FILE}", "build-keepset/keepset.safetensors"


def golden_of(run: SmallRun) -> tuple[RunArtifacts, GoldenRun]:
    return open_artifacts(run.root, run.recipe.target), open_golden(run.root)


def in_files(run: SmallRun, checkpoints: Checkpoints | None = None, tokenizer: object = None) -> list[Finding]:
    artifacts, golden = golden_of(run)
    reference, places = open_reference(run.root, artifacts.head, golden), checkpoints or run.checkpoints
    chosen = tokenizer or run.tokenizer
    return list(file_findings(artifacts, run.recipe, places, chosen, golden, reference))  # type: ignore[arg-type]


def in_server(run: SmallRun, served: Served) -> list[Finding]:
    artifacts, golden = golden_of(run)
    transport = LocalTransport(*served)
    probed = probe(golden.golden, golden.ids, transport, artifacts.head.handoff, served[1].head_digest)
    return list(server_findings(probed, open_reference(run.root, artifacts.head, golden), golden))


def require(findings: list[Finding], fault: str, where: str, seen: str = "") -> None:
    """All findings have the one name; one of them is at the place, with the figures."""
    assert {finding.fault for finding in findings} == {fault}, findings
    assert any(where in finding.where and seen in finding.seen for finding in findings), findings


# ---- nothing planted


def test_a_right_run_has_no_findings_on_any_back_end(small_run: SmallRun, served: Served) -> None:
    found = small_run.diagnose(*served)
    assert found.findings == ()
    assert found.positions >= 12
    assert len(found.acceptance) == len(found.expected_acceptance) == small_run.recipe.head.steps
    assert found.acceptance == found.expected_acceptance


def test_a_verifier_in_half_precision_is_the_same_verifier(small_run: SmallRun) -> None:
    half = msgspec.structs.replace(small_run.recipe.models.verifier, dtype="bfloat16")
    models = msgspec.structs.replace(small_run.recipe.models, verifier=half)
    served = replace(small_run, recipe=msgspec.structs.replace(small_run.recipe, models=models)).serve()
    assert in_server(small_run, served) == []


def test_a_server_that_breaks_is_named_and_the_rest_is_still_looked_at(
    small_run: SmallRun, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = Verifier.forward

    def broken(self: Verifier, parts: Sequence[Prefill | Check]) -> list[np.ndarray]:
        if any(isinstance(part, Check) for part in parts):
            raise RuntimeError("out of memory")
        return forward(self, parts)

    monkeypatch.setattr(Verifier, "forward", broken)
    require(in_server(small_run, served), "hand-off", "the server", "a call was refused (model_fault)")


def test_a_server_can_ask_itself(small_run: SmallRun, served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, info = served
    right = diagnose_server(small_run.root, LocalTransport(engine, info), info)
    assert right.findings == () and right.positions >= 12
    monkeypatch.setattr(Verifier, "_pass", hand_off_before_the_norm)
    require(
        list(diagnose_server(small_run.root, LocalTransport(engine, info), info).findings), "norm side", "the server"
    )
    assert engine.session_count == 0


# ---- 1: the side of the norm


def hand_off_before_the_norm(self: Verifier, *arguments: object) -> tuple[torch.Tensor, torch.Tensor]:
    return self._fused(*arguments)  # type: ignore[arg-type]  # the states after the norm, and those before it


def test_a_server_that_sends_h_from_before_the_norm(
    small_run: SmallRun, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Verifier, "_pass", hand_off_before_the_norm)
    require(in_server(small_run, served), "norm side", "the server", "from before the final norm")


def test_a_head_artifact_that_says_the_other_side(small_run: SmallRun, tmp_path: Path) -> None:
    def edit(root: Path) -> None:
        edit_json(root / HEAD_JSON, lambda spec: spec["handoff"].update(hidden_norm="pre"))

    wrong = plant(small_run, tmp_path, edit)
    require(in_files(wrong), "norm side", "head.json", "takes h from post, head.json says pre")
    require(in_server(wrong, wrong.serve()), "norm side", "the server", "from before")


# ---- 2: one wrong scale


@pytest.mark.parametrize(("tensor", "factor"), [("e", 0.5), ("h", 3.0), ("k.sliding", 2.0), ("v.full", 0.9)])
def test_a_server_that_encodes_with_another_scale(
    small_run: SmallRun, served: Served, tensor: str, factor: float
) -> None:
    encoder = verifier_of(served[0]).encoder
    assert encoder is not None
    grid = encoder.spec.encodings[tensor]
    changed = msgspec.structs.replace(grid, scale=grid.scale * factor)
    encoder.spec = msgspec.structs.replace(encoder.spec, encodings={**encoder.spec.encodings, tensor: changed})
    require(in_server(small_run, served), "scale", "the server", f"{tensor} arrives {1 / factor:.2g}"[:-1])


def test_a_server_whose_zero_point_is_off(small_run: SmallRun, served: Served) -> None:
    encoder = verifier_of(served[0]).encoder
    assert encoder is not None
    grid = encoder.spec.encodings["v.sliding"]
    changed = msgspec.structs.replace(grid, zero_point=grid.zero_point + 3)
    encoder.spec = msgspec.structs.replace(encoder.spec, encodings={**encoder.spec.encodings, "v.sliding": changed})
    require(
        in_server(small_run, served), "scale", "the server", "v.sliding arrives 1 times as large as it should, +3.0"
    )


def double_scale(tensor: onnx.TensorProto) -> None:
    tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor) * 2, tensor.name))


@pytest.mark.parametrize(
    ("file", "edit", "place", "seen"),
    [
        (HEAD_JSON, lambda s: s["handoff"]["encodings"]["k.full"].update(scale=0.5), "head.json, k.full", "scale 0.5"),
        (HEAD_JSON, lambda s: s["graph"]["inputs"][0]["encoding"].update(scale=0.5), "head.json, e", "scale 0.5"),
        (SLM_JSON, lambda s: s["tree"]["inputs"][0]["encoding"].update(scale=0.5), "slm.json", "scale 0.5"),
    ],
)
def test_a_scale_in_a_spec(small_run: SmallRun, tmp_path: Path, file: str, edit, place: str, seen: str) -> None:
    require(in_files(plant(small_run, tmp_path, lambda root: edit_json(root / file, edit))), "scale", place, seen)


@pytest.mark.parametrize(
    ("file", "constant"),
    [
        (HEAD_ONNX, "layers.1.mlp.up_proj/scale"),
        (HEAD_ONNX, "step2.layers.1.mlp.in/scale"),
        (SLM_ONNX, "layers.1.mlp.up_proj/scale"),
        (SLM_ONNX, "layers.1.mlp.in/scale"),
    ],
)
def test_a_scale_in_a_graph(small_run: SmallRun, tmp_path: Path, file: str, constant: str) -> None:
    wrong = plant(small_run, tmp_path, lambda root: edit_graph(root / file, lambda all_: double_scale(all_[constant])))
    require(in_files(wrong), "scale", constant.removesuffix("/scale"), "instead of")


def test_a_scale_of_the_trained_head_is_named_at_its_origin(small_run: SmallRun, tmp_path: Path) -> None:
    def edit(tensors: dict[str, np.ndarray]) -> None:
        tensors["layers.2.self_attn.q_proj.scales"][3] *= 2

    found = in_files(plant(small_run, tmp_path, lambda root: edit_tensors(root / TRAINED, edit)))
    require(found, "scale", "qat-head", "layers.2.self_attn.q_proj: 1 of")
    assert len(found) == 1


def test_a_scale_of_the_embedding_table(small_run: SmallRun, tmp_path: Path) -> None:
    def edit(tensors: dict[str, np.ndarray]) -> None:
        tensors["table_scale"][5] *= 2

    found = in_files(plant(small_run, tmp_path, lambda root: edit_tensors(root / KEPT, edit)))
    require(found, "scale", "table_scale", "1 of 300 scales differ")


# ---- 3: a permuted keep set


def permuted_rows(name: str, seed: int = 0):
    def edit(constants: dict[str, onnx.TensorProto]) -> None:
        rows = read_weight(constants[name])
        order = np.random.default_rng(seed).permutation(len(rows))
        constants[name].CopyFrom(weight_tensor(name, rows[order], 4))
        scales = constants[f"{name}/scale"]
        scales.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(scales)[order], scales.name))

    return edit


@pytest.mark.parametrize("file", [HEAD_ONNX, SLM_ONNX])
def test_output_rows_of_a_graph_in_another_order(small_run: SmallRun, tmp_path: Path, file: str) -> None:
    wrong = plant(small_run, tmp_path, lambda root: edit_graph(root / file, permuted_rows("lm_head")))
    require(in_files(wrong), "keep set", f"{file}, lm_head", "rows stand for other tokens")


def test_two_rows_of_the_graphs_table_swapped(small_run: SmallRun, tmp_path: Path) -> None:
    def edit(constants: dict[str, onnx.TensorProto]) -> None:
        table = constants["kept_embeddings"]
        rows = numpy_helper.to_array(table).copy()
        rows[[2, 40]] = rows[[40, 2]]
        table.CopyFrom(numpy_helper.from_array(rows, table.name))

    wrong = plant(small_run, tmp_path, lambda root: edit_graph(root / HEAD_ONNX, edit))
    require(in_files(wrong), "keep set", "kept_embeddings", "2 of 300 rows")


def test_ids_that_the_rows_do_not_belong_to(small_run: SmallRun, tmp_path: Path) -> None:
    vocab_size = len(small_run.tokenizer)

    def edit(root: Path) -> None:
        def move(tensors: dict[str, np.ndarray]) -> None:
            absent = np.setdiff1d(np.arange(vocab_size), tensors["ids"])
            assert len(absent)
            tensors["ids"] = np.sort(np.append(tensors["ids"][1:], absent[:1])).astype(np.int32)
            digest = KeepSet(tensors["ids"], vocab_size).digest
            for file in (HEAD_JSON, SLM_JSON):
                edit_json(root / file, lambda spec: spec.update(keepset_digest=digest))

        edit_tensors(root / KEPT, move)

    require(
        in_files(plant(small_run, tmp_path, edit)), "keep set", "keepset.safetensors", "rows stand for other tokens"
    )


def test_ids_out_of_order_are_refused_at_once(small_run: SmallRun, tmp_path: Path) -> None:
    def edit(tensors: dict[str, np.ndarray]) -> None:
        tensors["ids"] = tensors["ids"][::-1].copy()

    wrong = plant(small_run, tmp_path, lambda root: edit_tensors(root / KEPT, edit))
    with pytest.raises(ArtifactError, match="keep set of 300 ids is permuted"):
        in_files(wrong)


# ---- 4: another tokenizer


def test_another_tokenizer_on_the_device(small_run: SmallRun) -> None:
    other = train_tokenizer(["cats and dogs are other words. "] * 50)
    require(in_files(small_run, tokenizer=other), "tokenizer", "the device's tokenizer", "become other ids")


def test_an_slm_with_other_ids_for_the_same_words(small_run: SmallRun, tmp_path: Path) -> None:
    shutil.copytree(small_run.checkpoints.slm, tmp_path / "slm")
    path = tmp_path / "slm" / "tokenizer.json"
    content = json.loads(path.read_text())
    vocabulary = content["model"]["vocab"]
    first, second = list(vocabulary)[280:282]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    path.write_text(json.dumps(content))
    checkpoints = replace(small_run.checkpoints, slm=tmp_path / "slm")
    require(in_files(small_run, checkpoints), "tokenizer", "verifier and SLM", "2 of")


def test_an_slm_with_other_ids_and_one_more_token(small_run: SmallRun, tmp_path: Path) -> None:
    """Sizes differ as between releases of one family: the ids that both know are compared all the same."""
    shutil.copytree(small_run.checkpoints.slm, tmp_path / "slm")

    def reverse(content: dict) -> None:
        vocabulary = content["model"]["vocab"]
        chosen = list(vocabulary)[20:260]
        for token, number in zip(chosen, [vocabulary[token] for token in reversed(chosen)], strict=True):
            vocabulary[token] = number

    checkpoints = replace(small_run.checkpoints, slm=tmp_path / "slm")
    edit_json(tmp_path / "slm" / "tokenizer.json", add_token)
    assert in_files(small_run, checkpoints) == []  # an id of its own is no fault
    require_family(small_run_folder(small_run, tmp_path / "slm"))
    edit_json(tmp_path / "slm" / "tokenizer.json", reverse)
    require(in_files(small_run, checkpoints), "tokenizer", "verifier and SLM", "240 of")
    with pytest.raises(CheckpointError, match=r"240 of \d+ tokens have other ids in the SLM's tokenizer") as caught:
        require_family(small_run_folder(small_run, tmp_path / "slm"))
    assert "$.slm.bridge" in caught.value.hint


def add_token(content: dict) -> None:
    numbers = [*content["model"]["vocab"].values(), *(token["id"] for token in content["added_tokens"])]
    content["added_tokens"].append({**content["added_tokens"][0], "id": max(numbers) + 1, "content": "<own>"})


def small_run_folder(run: SmallRun, slm: Path) -> RunFolder:
    """The run of another SLM."""
    models = msgspec.structs.replace(
        run.recipe.models, slm=msgspec.structs.replace(run.recipe.models.slm, model=str(slm))
    )
    return RunFolder(run.root, msgspec.structs.replace(run.recipe, models=models), run.root.parent)


# ---- 5: the head of another verifier, another verifier


def test_a_head_of_another_verifier_that_was_converted_faithfully(small_run: SmallRun) -> None:
    """A random head drafts nothing that a random verifier takes; nothing else is wrong with it."""
    _, golden = golden_of(small_run)
    gates = msgspec.structs.replace(small_run.recipe.validation.gates, min_head_tokens=0.1)
    validation = msgspec.structs.replace(small_run.recipe.validation, gates=gates)
    strict = msgspec.structs.replace(small_run.recipe, validation=validation)
    found = list(published_head_findings(golden.golden, strict))
    require(found, "head", "$.models.head", "min_head_tokens is 0.1")
    assert list(published_head_findings(golden.golden, small_run.recipe)) == []  # the gate is 0 there


def test_weights_of_another_head_in_the_artifact(small_run: SmallRun, tmp_path: Path) -> None:
    def edit(tensors: dict[str, np.ndarray]) -> None:
        generator = np.random.default_rng(0)
        for name, values in tensors.items():
            if name.endswith(".integers"):
                tensors[name] = generator.integers(-7, 8, values.shape).astype(np.int8)

    found = in_files(plant(small_run, tmp_path, lambda root: edit_tensors(root / TRAINED, edit)))
    require(found, "head", "qat-head", "are not those of $.models.head")
    assert len(found) == 1


def test_a_graph_of_another_head(small_run: SmallRun, tmp_path: Path) -> None:
    def edit(constants: dict[str, onnx.TensorProto]) -> None:
        generator = np.random.default_rng(0)
        for name, tensor in list(constants.items()):
            if tensor.data_type == onnx.TensorProto.INT4 and len(tensor.dims) == 2:
                other = generator.integers(-7, 8, tuple(tensor.dims)).astype(np.int8)
                tensor.CopyFrom(weight_tensor(name, other, 4))

    found = in_files(plant(small_run, tmp_path, lambda root: edit_graph(root / HEAD_ONNX, edit)))
    require(found, "head", "head.onnx", "are not those of qat-head")


def test_a_server_with_another_verifier(small_run: SmallRun, served: Served) -> None:
    verifier = verifier_of(served[0])
    other = builders.small_verifier(len(small_run.tokenizer), seed=5)
    verifier._model, verifier._backbone, verifier._table = other, other.get_decoder(), None
    verifier._stack = FusedStack(verifier._backbone, compiled=False)
    require(in_server(small_run, served), "verifier", "the server", "nothing in common")


def test_a_servers_own_head_that_drafts_worse(small_run: SmallRun, served: Served) -> None:
    _, golden = golden_of(small_run)
    promised = [
        msgspec.structs.replace(
            session, roots=tuple(msgspec.structs.replace(r, server_accepted=2) for r in session.roots)
        )
        for session in golden.golden.sessions
    ]
    better = msgspec.structs.replace(golden.golden, sessions=tuple(promised))
    require(server_head_findings(better, golden.ids, LocalTransport(*served)), "head", "the server's own head")


# ---- 6: K/V rows shifted by one


@pytest.mark.parametrize(("kind", "shift", "words"), [("both", -1, "1 position earlier"), ("k", 1, "1 position later")])
def test_a_server_that_sends_rows_of_other_positions(
    small_run: SmallRun, served: Served, monkeypatch: pytest.MonkeyPatch, kind: str, shift: int, words: str
) -> None:
    committed = SlotCache.committed

    def shifted(self: SlotCache, layer: int, count: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = committed(self, layer)
        first = 0 if count is None else max(0, self.length - count)
        places = (torch.arange(first, self.length) + shift).clamp(0, self.length - 1)
        return keys[:, places], values[:, places if kind == "both" else slice(first, self.length)]

    monkeypatch.setattr(SlotCache, "committed", shifted)
    require(in_server(small_run, served), "K/V rows", "the server", words)


def test_rows_that_only_verify_rounds_shift(
    small_run: SmallRun, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep = SlotCache.keep

    def shifted(self: SlotCache, rows) -> None:
        keep(self, rows if list(rows) == list(range(len(rows))) and len(rows) != 4 else [rows[0], *rows[:-1]])

    monkeypatch.setattr(SlotCache, "keep", shifted)
    found = in_server(small_run, served)
    assert found and found[0].where.startswith("the server's verify rounds"), found


def test_a_hand_off_that_says_another_first_position(
    small_run: SmallRun, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    handoff = TorchVerifierSession.handoff

    def moved(self: TorchVerifierSession, root: int, count: int) -> Handoff:
        sent = handoff(self, root, count)
        return msgspec.structs.replace(sent, first_position=sent.first_position + 1)

    monkeypatch.setattr(TorchVerifierSession, "handoff", moved)
    require(in_server(small_run, served), "K/V rows", "the server", "1 position earlier")


@pytest.mark.parametrize("shift", [-1, 1])
def test_keys_rotated_for_another_position(
    small_run: SmallRun, served: Served, monkeypatch: pytest.MonkeyPatch, shift: int
) -> None:
    stack = verifier_of(served[0])._stack
    assert stack is not None
    rotations = stack.rotations
    monkeypatch.setattr(stack, "rotations", lambda positions: rotations(positions + shift))
    require(in_server(small_run, served), "positions", "the server", "later" if shift > 0 else "earlier")


@pytest.mark.parametrize("file", [HEAD_JSON, SLM_JSON])
def test_rotary_frequencies_of_another_build(small_run: SmallRun, tmp_path: Path, file: str) -> None:
    def edit(spec: dict) -> None:
        spec["inv_freq"]["full"][1] *= 1.1

    found = in_files(plant(small_run, tmp_path, lambda root: edit_json(root / file, edit)))
    require(found, "positions", file, "rotary frequencies are not those of the")


# ---- 7: a sliding window off by one


@pytest.mark.parametrize(("change", "words"), [(-1, "see 5 positions"), (1, "see more than 6")])
def test_a_server_whose_window_is_off_by_one(small_run: SmallRun, served: Served, change: int, words: str) -> None:
    verifier = verifier_of(served[0])
    window = builders.SLIDING_WINDOW + change
    verifier._windows = {"full_attention": None, "sliding_attention": window}
    groups = tuple(
        group if group.kept is None else replace(group, window=window, kept=max(group.kept, window - 1))
        for group in verifier.layout.groups
    )
    verifier.layout = replace(verifier.layout, groups=groups)
    require(in_server(small_run, served), "sliding window", "the server", words)


@pytest.mark.parametrize("change", [-1, 1])
@pytest.mark.parametrize("file", [HEAD_JSON, SLM_JSON])
def test_a_span_in_a_spec_that_is_off_by_one(small_run: SmallRun, tmp_path: Path, file: str, change: int) -> None:
    def edit(spec: dict) -> None:
        spec["spans"]["sliding"] += change

    found = in_files(plant(small_run, tmp_path, lambda root: edit_json(root / file, edit)))
    require(found, "sliding window", Path(file).name, "sliding_window makes it")


@pytest.mark.parametrize("change", [-1, 1])
def test_a_span_that_all_files_agree_on_is_told_by_transformers_own_head(small_run: SmallRun, change: int) -> None:
    """Where the code that reads the checkpoint's window is wrong, every file agrees; transformers' drafts do not."""
    artifacts, golden = golden_of(small_run)
    grids = open_reference(small_run.root, artifacts.head, golden).encodings
    right = artifacts.head.spans["sliding"]
    assert right is not None
    wrong = with_span(artifacts, right + change)
    found = network_findings(lambda run: golden_feeds(golden.golden, golden.texts, golden.ids, grids, run), wrong)
    require(found, "sliding window", "the device's head", f"with a span of {right} instead of {right + change}")


def with_span(artifacts: RunArtifacts, span: int) -> RunArtifacts:
    spans = {"sliding": span, "full": None}
    return replace(artifacts, head=msgspec.structs.replace(artifacts.head, spans=spans))


# ---- 8: probabilities: greedy texts and hand-offs are right in all of these


def in_probabilities(run: SmallRun, served: Served) -> list[Finding]:
    return distribution_findings(open_golden(run.root).golden.trees, LocalTransport(*served), served[1])


@pytest.mark.parametrize(("cap", "words"), [(None, "without a final soft-cap"), (15.0, "with a final soft-cap of 1")])
def test_a_server_with_another_soft_cap(small_run: SmallRun, served: Served, cap: float | None, words: str) -> None:
    verifier_of(served[0])._soft_cap = cap
    assert in_server(small_run, served) == []
    require(in_probabilities(small_run, served), "soft-cap", "the server's probabilities", words)
    require(list(small_run.diagnose(*served).findings), "soft-cap", "the server's probabilities", "is 30")
    found = diagnose_server(small_run.root, LocalTransport(*served), served[1])
    require(list(found.findings), "soft-cap", "the server's probabilities", words)


@pytest.mark.parametrize(("factor", "words"), [(1.5, "1.51 times"), (0.8, "times as large")])
def test_a_server_whose_output_layer_is_scaled(small_run: SmallRun, served: Served, factor: float, words: str) -> None:
    output = verifier_of(served[0])._model.get_output_embeddings()
    output.weight = torch.nn.Parameter(output.weight * factor, requires_grad=False)  # no longer the input's table
    assert in_server(small_run, served) == []
    require(in_probabilities(small_run, served), "logits", "the server's probabilities", words)


def test_a_server_whose_logits_only_keep_their_order(
    small_run: SmallRun, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    judge_in_numpy(monkeypatch, lambda logits: np.sign(logits) * logits**2)
    assert in_server(small_run, served) == []
    require(in_probabilities(small_run, served), "logits", "the server's probabilities", "no scale and no soft-cap")


def judge_in_numpy(monkeypatch: pytest.MonkeyPatch, changed: Callable = lambda logits: logits) -> None:
    """The server draws by `protocol.sampling`, whose parts the faults below replace."""

    def looked_at(_, queries):
        return [acceptance.look(query._replace(logits=changed(query.logits.numpy()))) for query in queries]

    monkeypatch.setattr(Verifier, "look", looked_at)


def asked_otherwise(monkeypatch: pytest.MonkeyPatch, everywhere: bool = False, **changes) -> None:
    """The server samples by other settings than those of the request; `everywhere`: it reports by them too."""
    judge_in_numpy(monkeypatch)
    support, raw = sampling.sampling_support, sampling.raw_distribution

    def changed(logits, asked):
        new = {field: change(getattr(asked, field)) for field, change in changes.items()}
        return support(logits, msgspec.structs.replace(asked, **new) if asked.temperature else asked)

    monkeypatch.setattr(sampling, "sampling_support", changed)
    if everywhere:
        heat = changes["temperature"]
        monkeypatch.setattr(sampling, "raw_distribution", lambda x, t, *tree: raw(x, heat(t) if t else t, *tree))


@pytest.mark.parametrize("everywhere", [True, False])
def test_a_server_that_takes_no_notice_of_the_temperature(
    small_run: SmallRun, served: Served, monkeypatch: pytest.MonkeyPatch, everywhere: bool
) -> None:
    asked_otherwise(monkeypatch, everywhere, temperature=lambda _: 1.0)
    words = "0.6 acts as 1" if everywhere else "with T 0.6, top-k 4, top-p 1"
    require(in_probabilities(small_run, served), "sampling", "the server's probabilities", words)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"top_p": lambda p: 1 - p if p < 1 else p}, "top-p 0.7 0 nodes outside"),
        ({"top_p": lambda _: 1.0}, "top-p 0.7"),
        ({"top_k": lambda _: 64}, "inside it none"),
        ({"top_k": lambda k: k and k - 1}, "top-k 4"),
        ({"top_k": lambda k: k and k + 1}, "top-k 4"),
    ],
)
def test_a_server_that_cuts_elsewhere(
    small_run: SmallRun, served: Served, monkeypatch: pytest.MonkeyPatch, changes, words: str
) -> None:
    asked_otherwise(monkeypatch, **changes)
    require(in_probabilities(small_run, served), "sampling", "the server's probabilities", words)


def test_entropies_of_the_wrong_distribution(
    small_run: SmallRun, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    judge_in_numpy(monkeypatch)
    raw = sampling.raw_distribution

    def in_bits(*arguments):
        probs, entropies = raw(*arguments)
        return probs, entropies / np.log(2)

    monkeypatch.setattr(sampling, "raw_distribution", in_bits)
    require(in_probabilities(small_run, served), "sampling", "the server's probabilities", "entropies")


@pytest.mark.parametrize(
    ("drawn", "words"),
    [
        (lambda support: support.ids[np.arange(len(support.ids)), support.probs.argmax(axis=1)], "the likeliest token"),
        (lambda support: support.ids[:, 0], "is not drawn by 24 seeds"),
    ],
)
def test_draws_that_are_not_those_of_the_probabilities(
    small_run: SmallRun, served: Served, monkeypatch: pytest.MonkeyPatch, drawn, words: str
) -> None:
    judge_in_numpy(monkeypatch)
    monkeypatch.setattr(sampling, "draws", lambda support, *_: drawn(support).astype(np.int64))
    require(in_probabilities(small_run, served), "sampling", "the server's probabilities", words)


def support_of(sampled) -> Callable:
    """The server draws as if `sampled(asked)` had been asked for; what it reports is right."""
    support, draws = sampling.sampling_support, sampling.draws
    latest = []

    def reported(logits, asked):
        latest[:] = [logits, asked]
        return support(logits, asked)

    def drawn(found, seed, positions):
        logits, asked = latest
        return draws(support(logits, sampled(asked)) if asked.temperature else found, seed, positions)

    return lambda patch: (
        patch.setattr(sampling, "sampling_support", reported),
        patch.setattr(sampling, "draws", drawn),
    )


def numbers_of(changed) -> Callable:
    """The server draws by other numbers u."""
    uniforms = sampling.uniforms
    return lambda patch: patch.setattr(
        sampling, "uniforms", lambda seed, positions: changed(uniforms, seed, np.asarray(positions))
    )


@pytest.mark.parametrize(
    "fault",
    [
        support_of(lambda asked: msgspec.structs.replace(asked, top_k=0, top_p=1.0)),
        support_of(lambda asked: msgspec.structs.replace(asked, temperature=1.0)),
        support_of(lambda asked: msgspec.structs.replace(asked, temperature=asked.temperature * 1.3)),
        numbers_of(lambda uniforms, seed, at: np.full(len(at), uniforms(seed, at[:1])[0])),
        numbers_of(lambda uniforms, seed, at: uniforms(seed, np.zeros_like(at))),
        numbers_of(lambda uniforms, seed, at: uniforms(seed, at + 1)),
        numbers_of(lambda uniforms, seed, at: uniforms(7, at)),
        numbers_of(lambda uniforms, seed, at: 1.0 - uniforms(seed, at)),
    ],
    ids=["uncut", "T 1", "hot", "one number", "no position", "next position", "no seed", "mirrored"],
)
def test_draws_that_are_not_those_of_their_seed(
    small_run: SmallRun, served: Served, monkeypatch: pytest.MonkeyPatch, fault: Callable
) -> None:
    judge_in_numpy(monkeypatch)
    fault(monkeypatch)
    require(in_probabilities(small_run, served), "sampling", "the server's probabilities", "draw")


def judged_by(judged_rule: str, changes) -> Callable:
    """The server judges rounds of a rule by other settings than those of the session."""

    def patched(patch: pytest.MonkeyPatch) -> None:
        decide = acceptance.decide

        def wrong(judged, settings, stop_ids):
            if settings.rule == judged_rule:
                new = {field: change(getattr(settings, field)) for field, change in changes.items()}
                settings = msgspec.structs.replace(settings, **new)
            return decide(judged, settings, stop_ids)

        patch.setattr("hyco_export.server.sessions.decide", wrong)

    return patched


@pytest.mark.parametrize(
    ("rule", "changes"),
    [
        ("epsilon", {"epsilon": lambda e: min(1.0, 10 * e)}),
        ("epsilon", {"epsilon": lambda e: e / 10}),
        ("epsilon", {"epsilon": lambda e: min(1.0, 1.5 * e)}),
        ("epsilon", {"rule": lambda _: "exact"}),
        ("epsilon", {"rule": lambda _: "epsilon-at-rejections"}),
        ("exact", {"rule": lambda _: "epsilon", "epsilon": lambda _: 0.1}),
        ("epsilon-at-rejections", {"rule": lambda _: "epsilon"}),
        ("epsilon-at-rejections", {"epsilon": lambda e: e / 10}),
        ("typical", {"rule": lambda _: "exact"}),
        ("typical", {"posterior_threshold": lambda p: p / 10}),
        ("typical", {"posterior_alpha": lambda a: a / 10}),
    ],
)
def test_a_server_that_accepts_by_another_rule(
    small_run: SmallRun, served: Served, monkeypatch: pytest.MonkeyPatch, rule: str, changes
) -> None:
    judged_by(rule, changes)(monkeypatch)
    require(in_probabilities(small_run, served), "verdict", "the server's probabilities", f"of the rule {rule} end")


def test_a_server_that_commits_another_bonus(
    small_run: SmallRun, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    decide = acceptance.decide
    monkeypatch.setattr(
        "hyco_export.server.sessions.decide",
        lambda *given: msgspec.structs.replace(verdict := decide(*given), bonus=verdict.bonus ^ 1),
    )
    require(in_probabilities(small_run, served), "verdict", "the server's probabilities", "not rows")


@pytest.mark.parametrize("change", [-1, 1])
def test_a_cut_that_is_off_by_one_at_any_top_k(
    small_run: SmallRun, served: Served, monkeypatch: pytest.MonkeyPatch, change: int
) -> None:
    """Also where only the recipe's own, wide cut is wrong: the ranks on both sides of it stand in every golden tree."""
    wide = small_run.recipe.sampling.top_k
    assert wide == 64
    asked_otherwise(monkeypatch, top_k=lambda k: k + change if k == wide else k)
    require(in_probabilities(small_run, served), "sampling", "the server's probabilities", "top-k 64")


def test_a_server_that_says_nothing_of_its_probabilities(
    small_run: SmallRun, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    verify = LocalTransport.verify
    monkeypatch.setattr(LocalTransport, "verify", lambda *a: msgspec.structs.replace(verify(*a), evidence=None))
    require(in_probabilities(small_run, served), "hand-off", "the server", "no evidence")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_right_probabilities_in_either_precision(small_run: SmallRun, dtype: str) -> None:
    models = small_run.recipe.models
    verifier = msgspec.structs.replace(models.verifier, dtype=dtype)
    recipe = msgspec.structs.replace(small_run.recipe, models=msgspec.structs.replace(models, verifier=verifier))
    assert in_probabilities(small_run, replace(small_run, recipe=recipe).serve()) == []


def test_golden_positions_of_an_older_release_are_refused_with_the_next_step(
    small_run: SmallRun, tmp_path: Path
) -> None:
    old = plant(
        small_run, tmp_path, lambda root: edit_json(root / "convert-head/golden.json", lambda g: g.pop("trees"))
    )
    with pytest.raises(ArtifactError, match="build it again: hyco-export convert-head"):
        open_golden(old.root)


def test_a_server_head_that_drafts_other_tokens_than_transformers(
    small_run: SmallRun, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, golden = golden_of(small_run)
    assert server_head_findings(golden.golden, golden.ids, LocalTransport(*served)) == []
    drafter = verifier_of(served[0]).drafter
    assert drafter is not None
    drafter._out = drafter._out * 3
    found = server_head_findings(golden.golden, golden.ids, LocalTransport(*served))
    require(found, "head", "the server's own head", "are not those of transformers' head")


def test_a_verifier_without_a_soft_cap(small_run: SmallRun, tmp_path: Path) -> None:
    """Nothing is wrong with a right server of it; one that caps its logits all the same is named."""
    folder = tmp_path / "verifier"
    shutil.copytree(small_run.checkpoints.verifier, folder)
    edit_json(folder / "config.json", lambda config: config.update(final_logit_softcapping=None))
    models = small_run.recipe.models
    verifier = msgspec.structs.replace(models.verifier, model=str(folder))
    recipe = msgspec.structs.replace(small_run.recipe, models=msgspec.structs.replace(models, verifier=verifier))
    served = open_server_engine(recipe)
    model, prompt = load_verifier(folder, "float32"), [9, 33, 7, 120, 54]
    tree = golden_tree(model, [*prompt, *greedy_answer(model, prompt, 30)], len(prompt), recipe.sampling)
    assert tree is not None and tree.soft_cap is None and tree.logits == tree.plain_logits
    assert distribution_findings([tree], LocalTransport(*served), served[1]) == []
    verifier_of(served[0])._soft_cap = 15.0
    found = distribution_findings([tree], LocalTransport(*served), served[1])
    require(found, "soft-cap", "the server's probabilities", "the checkpoint's is none")


def test_golden_probabilities_add_up_and_cuts_are_where_they_should_be(small_run: SmallRun) -> None:
    """A truth has to be true itself: by plain arithmetic on its own figures."""
    trees = open_golden(small_run.root).golden.trees
    assert len(trees) == 3 and all(len(tree.tokens) >= 54 for tree in trees)
    for tree in trees:
        for each in tree.distributions:
            logits, parents = np.array(tree.logits), np.array(tree.parents)
            for row in tree.rows:
                children = parents == row - 1
                gaps = np.subtract.outer(logits[children], logits[children]) / each.temperature
                found = np.subtract.outer(np.array(each.log_probs)[children], np.array(each.log_probs)[children])
                assert np.allclose(gaps, found, atol=1e-4)
                kept = np.array(each.probs)[children]
                assert kept.sum() <= 1 + 1e-6 and kept[logits[children].argmax()] > 0
                if each.top_k:
                    assert (kept > 0).sum() <= each.top_k
            clear = np.abs(each.edges) > 1e-6
            assert np.array_equal((np.array(each.edges) > 0)[clear], (np.array(each.probs) > 0)[clear])
        cuts = [np.array(each.probs) == 0 for each in tree.distributions]
        assert not cuts[0].any() and all(cut.any() for cut in cuts[1:])
        assert np.allclose(30 * np.tanh(np.array(tree.plain_logits) / 30), tree.logits, atol=1e-4)


def test_an_answer_that_is_too_short_has_no_golden_tree(small_run: SmallRun) -> None:
    model = load_verifier(small_run.checkpoints.verifier, "float32")
    assert golden_tree(model, range(10, 10 + DEPTH + 1), 1, small_run.recipe.sampling) is None
