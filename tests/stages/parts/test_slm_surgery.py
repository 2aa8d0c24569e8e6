"""An SLM with a vocabulary of its own, converted for the embedded verifier and driven against it."""

import json
import math
from pathlib import Path

import msgspec
import numpy as np
import pytest
import yaml

from hyco_export.core.artifact import KEEPSET, SLM, read_manifest
from hyco_export.core.files import CHECKPOINTS, resource_path
from hyco_export.core.keepset import KeepSet, read_keepset
from hyco_export.core.recipe import Checkpoint
from hyco_export.core.recipe_loading import load_recipe
from hyco_export.core.token_bridge import BRIDGE_FILE, read_bridge
from hyco_export.dev.created.tokenizer import DROPPED_SHARE, create_respelled
from hyco_export.device.backends import open_slm
from hyco_export.device.drafters import NullDrafter, SpecEdgeDrafter, TreeRule
from hyco_export.device.driver import generate
from hyco_export.device.interfaces import Request
from hyco_export.device.slm import BridgedSlm
from hyco_export.device.tree_builder import SlmState
from hyco_export.errors import CheckpointError
from hyco_export.models.text.tokenizer import open_tokenizer
from hyco_export.protocol import wire
from hyco_export.protocol.tree import Source
from hyco_export.server.assembly import open_server_engine
from hyco_export.server.engine import LocalTransport
from hyco_export.stages.checks import require_family
from hyco_export.stages.declarations import Silent
from hyco_export.stages.parts.slm_surgery import find_columns
from hyco_export.stages.run_folder import RunFolder
from hyco_export.stages.runner import build_all
from hyco_export.stages.table import chain_to, stages_of

GREEDY = wire.Sampling(0.0, 0, 1.0)
PROMPTS = 4


@pytest.fixture(scope="module")
def respelled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return create_respelled(tmp_path_factory.mktemp("respelled") / "family")


def short_recipe(recipe: Path) -> Path:
    """Little calibration, no head."""
    content = yaml.safe_load(recipe.read_text())
    for part in ("calibration", "validation"):
        lines = resource_path(content["data"][part]).read_text().splitlines()[:PROMPTS]
        (recipe.parent / f"{part}.jsonl").write_text("\n".join(lines))
        content["data"][part] = f"{part}.jsonl"
    content["models"].pop("head")
    content["capture"] |= {"max_new_tokens": 32, "validation_max_new_tokens": 32, "sampled_answers": 0}
    content["slm"]["evidence_passes"] = 0
    content["calibration"] |= {"slm_quality_passes": 4}
    content["validation"] |= {"prompts": PROMPTS}
    path = recipe.with_name("short.yaml")
    path.write_text(yaml.safe_dump(content))
    return path


def test_its_rows_are_the_embedded_slms_under_other_names(respelled: Path) -> None:
    from transformers import AutoModelForCausalLM

    ours, theirs = (open_tokenizer(folder).backend for folder in (CHECKPOINTS / "slm", respelled.parent / "slm"))
    assert 0.7 < theirs.get_vocab_size() / ours.get_vocab_size() < 1 - DROPPED_SHARE / 2
    before, after = (
        AutoModelForCausalLM.from_pretrained(folder) for folder in (CHECKPOINTS / "slm", respelled.parent / "slm")
    )
    text = "How do I sort a list?"
    ids = theirs.encode(text, add_special_tokens=False).ids
    names = [theirs.id_to_token(token) for token in ids]
    import torch

    with torch.inference_mode():
        known = before(input_ids=torch.tensor([[ours.token_to_id(name) for name in names]])).logits[0]
        found = after(input_ids=torch.tensor([ids])).logits[0]
    columns = [ours.token_to_id(name) for name in names]
    assert torch.equal(known[:, columns], found[:, ids])


def test_without_a_bridge_it_is_refused(respelled: Path, tmp_path: Path) -> None:
    recipe = load_recipe(respelled)
    bare = msgspec.structs.replace(recipe, slm=msgspec.structs.replace(recipe.slm, bridge=msgspec.UNSET))
    require_family(RunFolder(tmp_path, recipe, respelled.parent))
    with pytest.raises(CheckpointError, match="the SLM's vocabulary has 1545 tokens, the verifier's 2048"):
        require_family(RunFolder(tmp_path, bare, respelled.parent))


def test_columns_without_a_bridge_are_the_keep_sets() -> None:
    keepset = KeepSet(np.array([3, 5]), 8)
    columns = find_columns(None, keepset, None, Path("slm"), 8)
    assert columns.kept is keepset
    assert columns.read([[1, 2], [7]]) == [[1, 2], [7]]


@pytest.mark.slow
def test_it_drafts_for_the_verifier_and_changes_nothing(respelled: Path, tmp_path: Path) -> None:
    path = short_recipe(respelled)
    recipe = load_recipe(path)
    run = RunFolder(tmp_path / "run", recipe, path.parent)
    build_all(run, chain_to(stages_of(recipe), SLM), Silent())
    keepset, bridge = read_keepset(run.root / KEEPSET), read_bridge(run.root / SLM / BRIDGE_FILE)
    metrics = read_manifest(run.root / SLM).metrics
    assert set(bridge.verifier_ids.tolist()) <= set(keepset.ids.tolist())
    assert metrics["bridged_tokens"] == len(bridge.drafter_ids)
    assert metrics["tokens_per_verifier_token"] > 1.0

    served = msgspec.structs.replace(
        recipe, models=msgspec.structs.replace(recipe.models, head=Checkpoint(model="embedded:head"))
    )
    engine, info = open_server_engine(served, None, recipe_folder=path.parent)
    transport = LocalTransport(engine, info)
    slm = BridgedSlm(open_slm(run.root, "onnx-cpu"), bridge)
    rule = TreeRule(math.log(0.9), 32, 16, passes=4)
    drafter = SpecEdgeDrafter(SlmState(slm, bridge.verifier_ids, info.stop_ids), rule)
    tokenizer = open_tokenizer(CHECKPOINTS / "verifier").backend
    accepted = 0
    for line in (path.parent / "validation.jsonl").read_text().splitlines():
        question = json.loads(line)["messages"][0]["content"]
        prompt = tokenizer.encode(f"<|turn>user\n{question}<turn|>\n<|turn>model\n").ids
        texts = []
        for one in (NullDrafter(), drafter):
            request = Request("any", "p", GREEDY, wire.Acceptance("exact", 1.0), 1, 24)
            trace = generate(prompt, request, one, transport)
            texts.append(trace.tokens)
            accepted += sum(
                record.tree.sources[row] == Source.SLM for record in trace.rounds for row in record.accepted
            )
        assert texts[0] == texts[1]
    assert accepted > PROMPTS
