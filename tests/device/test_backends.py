"""Back ends on real (small, seeded) artifacts: the device's SLM is transformers' SLM, its head the stage's head."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from hyco_export.core.device_spec import to_integers
from hyco_export.core.handoff import LAYER_TYPES, KvRows
from hyco_export.core.keepset import KEEPSET_FILE, read_keepset
from hyco_export.core.network.host import draft_feeds, on_grid
from hyco_export.core.recipe import Calibration, Capture, HeadGraph, Qat, SlmGraph
from hyco_export.core.ring import slot_positions
from hyco_export.device.backends import open_head, open_slm
from hyco_export.device.drafters import SpecEdgeDrafter, TreeRule
from hyco_export.device.interfaces import Given
from hyco_export.device.slm import GraphSlm
from hyco_export.device.tree_builder import SlmState
from hyco_export.errors import CompileError
from hyco_export.graph.parity import ReferenceSession
from hyco_export.models.capture import load_capture
from hyco_export.models.embedding_table import find_embedding, quantized_embedding
from hyco_export.models.head.calibration import recorded
from hyco_export.models.head.static_pass import float_head
from hyco_export.models.slm.packed import stock_model
from hyco_export.protocol.tree import ROOT, depths, path_to
from hyco_export.stages import capture, captured, convert_head, convert_slm, qat_head
from hyco_export.stages.declarations import Silent
from hyco_export.stages.table import CaptureConfig, ConvertHeadConfig, ConvertSlmConfig, QatConfig
from tests.support import builders
from tests.support.packed_slm import VOCAB, random_ids, save_packed_slm

BACKENDS = ("torch", "onnx-cpu")
WORST_ERROR = {"torch": 0.1, "onnx-cpu": 0.3}  # 8-bit K/V; and ranges from three short random sequences
KEPT = np.arange(0, VOCAB, 2, dtype=np.int32)
RING = 12
SLM_CONFIG = ConvertSlmConfig(
    SlmGraph(rows=6, prefill_rows=5, ring=RING, sliding_ring=8), Calibration(), sequence_limit=40
)
HEAD_WINDOW = 16  # shorter than the captured sequence: the ring wraps


@pytest.fixture(scope="module")
def slm_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder with a converted SLM; its checkpoint is in `slm`."""
    root = tmp_path_factory.mktemp("slm-run")
    names = ("capture", "build-keepset", "convert-slm")
    for name in names:
        (root / name).mkdir()
    save_packed_slm(root / "slm")
    lines = [
        {"id": f"{split}{i}", "split": split, "messages": [], "prompt_ids": random_ids(4, i),
         "answer_ids": random_ids(24, 10 * i), "text": ""}
        for split in ("calibration", "validation") for i in range(3)
    ]  # fmt: skip
    (root / "capture" / "answers.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    save_file({"ids": KEPT}, root / "build-keepset" / KEEPSET_FILE, metadata={"vocab_size": str(VOCAB)})
    inputs = {name: root / name for name in ("slm", *names)}
    convert_slm.build(SLM_CONFIG, inputs, root / "convert-slm", Silent())
    return root


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("length", [1, 5, 9, RING])
def test_slm_of_a_back_end_is_transformers_slm(slm_run: Path, backend: str, length: int) -> None:
    ids = list(random_ids(length, 77))
    tokens, parents = [5, 9, 14, 20, 31], [ROOT, 0, 0, 1, 3]
    slm = open_slm(slm_run, backend)
    slm.prefill(np.array(ids))
    found = slm.tree_pass(np.array(tokens), np.array(parents))  # [5, C]
    for row in range(len(tokens)):
        path = [tokens[node] for node in path_to(parents, row)]
        expected = stock_log_probs(slm_run, [*ids, *path])
        assert relative_error(found[row], expected) < WORST_ERROR[backend], f"row {row}"
    slm.commit(np.array([0, 2]))
    if length + 2 <= RING:  # beyond, the ring forgets what transformers still sees
        again = slm.tree_pass(np.array([40]), np.array([ROOT]))
        expected = stock_log_probs(slm_run, [*ids, 5, 14, 40])
        assert relative_error(again[0], expected) < WORST_ERROR[backend]
    slm.close()


def relative_error(found: np.ndarray, expected: np.ndarray) -> float:
    """Root mean square error beside the spread of the expected values; about 1.4 for unrelated ones."""
    return float(np.sqrt(np.mean((found - expected) ** 2)) / expected.std())


def stock_log_probs(run: Path, ids: list[int]) -> np.ndarray:
    """log q [C] over the kept tokens after `ids`, by transformers."""
    with torch.no_grad():
        logits = stock_model(run / "slm")(torch.tensor([ids])).logits[0, -1, torch.from_numpy(KEPT.astype(np.int64))]
    return torch.log_softmax(logits.double(), dim=-1).numpy()


def test_both_back_ends_agree_behind_a_wrapped_ring(slm_run: Path) -> None:
    ids = np.array(random_ids(40, 5))
    tokens, parents = np.array([5, 9, 14]), np.array([ROOT, 0, 0])

    def log_probs(slm: GraphSlm) -> np.ndarray:
        slm.reset(3)
        slm.prefill(ids)
        return slm.tree_pass(tokens, parents)

    first, second = (log_probs(open_slm(slm_run, backend)) for backend in BACKENDS)
    assert relative_error(second, first) < WORST_ERROR["onnx-cpu"]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("per_row", "rows_run"), [(1, 1 + 1 + 2 + 3 + 4), (2, 1 + 2 + 6)])
def test_every_edge_of_a_tree_of_several_passes_costs_what_transformers_says(
    slm_run: Path, backend: str, per_row: int, rows_run: int
) -> None:
    ids = list(random_ids(6, 31))
    slm = open_slm(slm_run, backend)
    rule = TreeRule(math.log(0.9), budget=6, candidates_per_row=per_row, passes=5)
    drafter = SpecEdgeDrafter(SlmState(slm, KEPT.astype(np.int64), set()), rule)
    drafter.begin(ids, Given())
    tree = drafter.propose(ids).tree
    assert slm.next_row == rows_run  # the root, then every further pass with the ancestors of its nodes
    found, expected = [], []
    for row, parent in enumerate(tree.parents):
        path = [tree.tokens[node] for node in path_to(tree.parents, parent)]
        base = tree.log_probs[parent] if parent != ROOT else 0.0
        found.append(tree.log_probs[row] - base - rule.edge_log_prob)
        stock = stock_log_probs(slm_run, [*ids, *path])
        expected.append(stock[np.searchsorted(KEPT, tree.tokens[row])])
    spread = stock_log_probs(slm_run, ids).std()
    assert max(depths(tree.parents)) > 1
    assert np.sqrt(np.mean((np.array(found) - expected) ** 2)) / spread < WORST_ERROR[backend]
    # rows of different passes in one ring: what follows the deepest path is what follows it in transformers
    deepest = int(np.argmax(depths(tree.parents)))
    path = path_to(tree.parents, deepest)
    new_ids = [*ids, *(tree.tokens[node] for node in path), 40]
    drafter.observe(path, new_ids, Given())
    missing = new_ids[slm.length :]
    after = slm.tree_pass(np.array(missing), np.arange(ROOT, len(missing) - 1))
    assert relative_error(after[-1], stock_log_probs(slm_run, new_ids)) < WORST_ERROR[backend]
    slm.close()


@pytest.fixture(scope="module")
def head_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder with a converted head."""
    torch.set_num_threads(1)
    root = tmp_path_factory.mktemp("head-run")
    builders.save_family(root)
    stages = ("capture", "qat-head", "build-keepset", "convert-head")
    inputs = {name: root / name for name in ("verifier", "head", *stages)}
    inputs |= {split: root / f"{split}.jsonl" for split in ("calibration", "validation")}
    for stage in stages:
        inputs[stage].mkdir()
    for split in ("calibration", "validation"):
        line = {"id": split, "messages": [{"role": "user", "content": builders.TEXTS[2]}]}
        inputs[split].write_text(json.dumps(line) + "\n")
    write_keepset(inputs["build-keepset"], inputs["verifier"])
    answers = Capture(max_new_tokens=12, validation_max_new_tokens=12)
    capture.build(CaptureConfig(answers, "post", "float32"), inputs, inputs["capture"], Silent())
    training = Qat(steps=1, warmup_steps=0, autocast="float32")
    qat_head.build(QatConfig(training, "float32", "post", 3, HEAD_WINDOW), inputs, inputs["qat-head"], Silent())
    shape = HeadGraph(steps=3, runner_up_steps=1, window=HEAD_WINDOW)
    config = ConvertHeadConfig(shape, Calibration(), "post", "float32")
    convert_head.build(config, inputs, inputs["convert-head"], Silent())
    return root


def write_keepset(folder: Path, verifier: Path) -> None:
    vocab_size = json.loads((verifier / "config.json").read_text())["vocab_size"]
    ids = np.arange(0, vocab_size, 3, dtype=np.int32)
    table = quantized_embedding(find_embedding(verifier), ids, "float32")
    tensors = {"ids": ids, "table": table.integers, "table_scale": table.scale}
    save_file(tensors, folder / KEEPSET_FILE, metadata={"vocab_size": str(vocab_size)})


@pytest.mark.parametrize("backend", BACKENDS)
def test_head_of_a_back_end_drafts_what_its_graph_says_of_the_capture(head_run: Path, backend: str) -> None:
    head = open_head(head_run, backend)
    spec, kept = head.spec, read_keepset(head_run / "build-keepset").ids
    values = recorded(load_capture(captured.sequence_paths(head_run / "capture", "validation")[0]))
    grids = spec.handoff.encodings
    integers = {name: grids[name].quantize(array) for name, array in values.items()}
    folders = {stage: head_run / stage for stage in ("qat-head", "build-keepset", "capture")}
    reference = float_head(folders, spec.steps, spec.runner_up_steps, HEAD_WINDOW, spec.handoff.hidden_norm)
    graph = ReferenceSession(head_run / "convert-head" / "head.onnx")
    count = len(values["e"])
    assert count > HEAD_WINDOW + 4
    for root in range(1, count):
        place = slice(root - 1, root)
        k, v = ({t: integers[f"{kind}.{t}"][place] for t in LAYER_TYPES} for kind in "kv")
        head.commit(KvRows(k, v), root - 1)
        draft = head.draft(integers["e"][root], integers["h"][root - 1], root)
        keys = slot_positions(root, HEAD_WINDOW)
        feeds = draft_feeds(reference.network, on_grid(values, grids), np.array([root]), keys, spec.mask_value)
        expected = reference.draft(feeds) if backend == "torch" else graph.run(to_integers(spec.graph.inputs, feeds))
        assert list(draft.chain) == kept[expected["chain"].ravel()].tolist()
        assert list(draft.runner_ups) == kept[expected["runner_up"].ravel()].tolist()
    head.close()


def test_binaries_that_were_not_compiled_name_the_command(slm_run: Path) -> None:
    with pytest.raises(CompileError, match=r"slm_tree_ctx\.onnx does not exist \(compile it: hyco-export compile\)"):
        open_slm(slm_run, "qnn", "sm8850")
