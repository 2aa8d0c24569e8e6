"""The dry run: it works without checkpoints, names what is missing, and foretells what a real run takes."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from hyco_export.core.artifact import read_manifest
from hyco_export.core.recipe_loading import embedded_recipe, load_recipe
from hyco_export.core.recipe_sections import DataSource
from hyco_export.dev.created.family import create_family
from hyco_export.errors import CheckpointError, RecipeError
from hyco_export.models.checkpoints import checkpoint_folder
from hyco_export.models.families.released_configs import SMALL
from hyco_export.stages.checks import prepare_data
from hyco_export.stages.declarations import Silent
from hyco_export.stages.forecast import expected_work, forecast
from hyco_export.stages.plan import plan
from hyco_export.stages.run_folder import RunFolder
from hyco_export.stages.runner import build_all
from hyco_export.stages.table import STAGES, stages_of

RECIPES = sorted(embedded_recipe().parent.glob("*.yaml"))
CLOSE = 0.2  # of the measured value
LIBRARIES_BYTES = 803_000_000  # of LOAD_LIBRARIES where core.sizes' base was measured
LOAD_LIBRARIES = """
from hyco_export.core.memory import measured
with measured() as peak:
    import hyco_export.models.capture
    import torch, transformers
    transformers.Gemma4ForCausalLM, transformers.Gemma4AssistantForCausalLM, torch.ones(64, 64) @ torch.ones(64, 64)
print(peak.own_bytes)
"""


def dry_run(path: Path, root: Path, **models: object) -> RunFolder:
    recipe = load_recipe(path)
    if models:
        recipe = msgspec.structs.replace(recipe, models=msgspec.structs.replace(recipe.models, **models))
    return RunFolder(root, recipe, path.parent)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_shipped_recipes_are_estimated_without_the_hub(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))  # where GGUF files would have been imported
    run = dry_run(path, tmp_path / "run")
    stages = stages_of(run.recipe)
    found = forecast(run, stages)
    assert [item.stage for item in found.stages] == list(stages)
    for item in found.stages:
        assert item.reason
        assert item.estimate is not None
        assert item.estimate.disk_bytes > 50_000
        assert item.estimate.ram_bytes > 900_000_000
    assert found.stages[0].estimate.tokens > 0
    assert found.stages[-1].estimate.binary_bytes > 1_000_000
    assert not (tmp_path / "run").exists()
    if path == embedded_recipe():
        assert found.missing == ()
    else:
        slm = run.recipe.models.slm
        wanted = slm.gguf_file or f"hf download {slm.model}"
        assert any(wanted in line for line in found.missing)
        told = [line for line in found.missing if "is not on this machine" in line]  # one line a checkpoint
        assert len(told) == len([one for one in msgspec.structs.astuple(run.recipe.models)[:3] if one is not None])
        assert all("; sizes " in line for line in told)
        assert "needs verifier" in found.stages[0].reason


def test_a_generation_config_that_cannot_be_honoured_ends_the_plan_and_the_build(tmp_path: Path) -> None:
    recipe = load_recipe(embedded_recipe())
    folder = shutil.copytree(checkpoint_folder(recipe.models.verifier), tmp_path / "verifier")
    path = folder / "generation_config.json"
    for fields, says in (({"temperature": 0.5}, r"temperature 0\.5"), ({"min_new_tokens": 4}, "min_new_tokens to 4")):
        path.write_text(json.dumps(json.loads(path.read_bytes()) | fields))
        verifier = msgspec.structs.replace(recipe.models.verifier, model=str(folder))
        run = dry_run(embedded_recipe(), tmp_path / "run", verifier=verifier)
        if "temperature" in fields:
            assert any(re.search(says, note) for note in forecast(run, STAGES).notes)
            continue
        with pytest.raises(CheckpointError, match=says):
            forecast(run, STAGES)
        with pytest.raises(CheckpointError, match=says):
            build_all(run, STAGES, Silent())
        assert not any((tmp_path / "run").glob("*/manifest.json"))


def test_a_model_nobody_knows_gives_a_plan_without_estimates(tmp_path: Path) -> None:
    recipe = load_recipe(embedded_recipe())
    unknown = msgspec.structs.replace(recipe.models.slm, model="somebody/else")
    found = forecast(dry_run(embedded_recipe(), tmp_path / "run", slm=unknown), STAGES)
    assert all(item.estimate is None for item in found.stages)
    assert any("nothing is known of somebody/else" in note for note in found.notes)
    gone = msgspec.structs.replace(recipe.models.slm, model="./gone")
    with pytest.raises(CheckpointError, match=r"'./gone' does not exist"):
        forecast(dry_run(embedded_recipe(), tmp_path / "run", slm=gone), STAGES)


def test_data_that_are_not_at_hand_are_named_or_assumed(tmp_path: Path) -> None:
    recipe = load_recipe(embedded_recipe())
    commit = "0123456789abcdef0123456789abcdef01234567"
    hub = DataSource(dataset="some/chats", split="train", revision=commit, limit=7)
    data = msgspec.structs.replace(recipe.data, calibration=hub, validation="gone.jsonl")
    found = forecast(RunFolder(tmp_path / "run", msgspec.structs.replace(recipe, data=data), None), STAGES)
    assert found.missing == ("$.data.validation: gone.jsonl does not exist",)
    assert found.stages[0].reason == "needs validation"
    assert "$.data.calibration is not here: 7 prompts of 60 tokens assumed" in found.notes
    assert all(item.estimate for item in found.stages)
    assert not (tmp_path / "run").exists()


OVERLAP = '{"messages": [{"role": "user", "content": "same?"}]}\n'


@pytest.mark.parametrize(
    ("calibration", "validation", "prompts", "words"),
    [
        (OVERLAP, OVERLAP.replace("same?", "Same? "), 1, r"\$\.data\.validation: conversation .* also calibrates"),
        (OVERLAP, OVERLAP.replace("same", "other"), 50, r"\$\.validation\.prompts is 50, but .*val\.jsonl holds 1"),
        (OVERLAP, 2 * OVERLAP.replace("same", "other"), 1, r"val\.jsonl holds 'text:.*' twice"),
    ],
)
def test_the_plan_refuses_the_prompts_that_the_build_refuses(
    tmp_path: Path, calibration: str, validation: str, prompts: int, words: str
) -> None:
    run = dry_run(embedded_recipe(), tmp_path / "run")
    (tmp_path / "cal.jsonl").write_text(calibration)
    (tmp_path / "val.jsonl").write_text(validation)
    data = msgspec.structs.replace(
        run.recipe.data, calibration=str(tmp_path / "cal.jsonl"), validation=str(tmp_path / "val.jsonl")
    )
    wanted = msgspec.structs.replace(run.recipe.validation, prompts=prompts)
    run.recipe = msgspec.structs.replace(run.recipe, data=data, validation=wanted)
    with pytest.raises(RecipeError, match=words):
        forecast(run, stages_of(run.recipe))
    with pytest.raises(RecipeError, match=words):
        prepare_data(run, plan(run, stages_of(run.recipe)), Silent())


def test_a_selection_is_counted_without_being_written(tmp_path: Path) -> None:
    recipe = load_recipe(embedded_recipe())
    first = DataSource(path=recipe.data.calibration, limit=3)
    data = msgspec.structs.replace(recipe.data, calibration=first)
    run = RunFolder(tmp_path / "run", msgspec.structs.replace(recipe, data=data), None)
    whole = expected_work(RunFolder(tmp_path / "run", recipe, None), None, [])
    assert expected_work(run, None, []).calibration.sequences == 3 < whole.calibration.sequences
    assert not (tmp_path / "run").exists()
    run.source("calibration", first)
    assert expected_work(run, None, []).calibration.sequences == 3


def test_a_coverage_is_estimated_at_its_largest(tmp_path: Path) -> None:
    recipe = load_recipe(embedded_recipe())
    keepset = msgspec.structs.replace(recipe.keepset, size=None, coverage=0.9)
    found = forecast(RunFolder(tmp_path / "run", msgspec.structs.replace(recipe, keepset=keepset), None), STAGES)
    assert any("$.keepset.coverage may keep all" in note for note in found.notes)
    sized = forecast(RunFolder(tmp_path / "run", recipe, None), STAGES)
    assert found.stages[2].estimate.disk_bytes > sized.stages[2].estimate.disk_bytes


def test_written_answers_are_counted_where_there_is_no_head(tmp_path: Path) -> None:
    recipe = load_recipe(embedded_recipe())
    turn = '{"id": "%s", "messages": [{"role": "user", "content": "What?"}, {"role": "assistant", "content": "%s"}]}'
    (tmp_path / "said.jsonl").write_text("\n".join(turn % (name, 400 * "word ") for name in "ab"))
    alone = msgspec.structs.replace(
        recipe,
        models=msgspec.structs.replace(recipe.models, head=None),
        data=msgspec.structs.replace(recipe.data, calibration="said.jsonl"),
        capture=msgspec.structs.replace(recipe.capture, max_new_tokens=5, sequence_limit=2048),
    )
    found = expected_work(RunFolder(tmp_path / "run", alone, tmp_path), None, [])
    assert found.calibration.answer_tokens == 499  # 2,000 characters, trimmed, 4 a token
    assert found.sampled.sequences == 0


@pytest.mark.slow
def test_estimates_of_a_created_family_are_what_its_run_takes(tmp_path: Path) -> None:
    create_family(tmp_path / "family", SMALL, None, 0, lambda label, share: None)
    run = dry_run(tmp_path / "family" / "recipe.yaml", tmp_path / "run")
    before = forecast(run, STAGES)
    recipe = tmp_path / "family" / "recipe.yaml"
    command = [sys.executable, "-m", "hyco_export", "compile", "--recipe", recipe, "--run", run.root]
    subprocess.run(command, check=True, capture_output=True)  # in a process that holds nothing else
    manifests = {stage.name: read_manifest(run.folder(stage)) for stage in STAGES}
    elsewhere = abs(_libraries_bytes() - LIBRARIES_BYTES)
    for item in before.stages:
        manifest, estimate = manifests[item.stage.name], item.estimate
        assert estimate is not None
        assert estimate.disk_bytes == pytest.approx(manifest.size_bytes, rel=CLOSE), item.stage.name
        measured = manifest.total_rss_bytes
        assert estimate.ram_bytes == pytest.approx(measured, abs=CLOSE * measured + elsewhere), item.stage.name
    assert before.stages[0].estimate.tokens == manifests["capture"].metrics["tokens"]
    binaries = sum(path.stat().st_size for path in run.folder(STAGES[-1]).glob("*.bin"))
    assert before.stages[-1].estimate.binary_bytes == pytest.approx(binaries, rel=CLOSE)
    assert all(item.fresh for item in forecast(run, STAGES).stages)


def _libraries_bytes() -> int:
    """What torch and transformers take here before any model: some kernels count far more of a mapped file."""
    return int(
        subprocess.run([sys.executable, "-c", LOAD_LIBRARIES], check=True, capture_output=True, text=True).stdout
    )
