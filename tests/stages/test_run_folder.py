"""What the runner asks of checkpoints: quantised ones are refused where they teach, unpinned ones are said."""

import json
import shutil
from pathlib import Path

import msgspec
import pytest

from hyco_export.core.recipe import Checkpoint
from hyco_export.core.recipe_loading import embedded_recipe, load_recipe
from hyco_export.errors import CheckpointError, RecipeError
from hyco_export.stages.checks import note_unpinned, require_full_precision, require_lengths
from hyco_export.stages.run_folder import RunFolder, origins
from hyco_export.stages.table import CAPTURE_STAGE
from tests.support import builders

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def run_with(tmp_path: Path, **models) -> RunFolder:
    recipe = load_recipe(embedded_recipe())
    recipe = msgspec.structs.replace(recipe, models=msgspec.structs.replace(recipe.models, **models))
    return RunFolder(tmp_path / "run", recipe, None)


def test_a_quantised_verifier_is_captured_only_where_the_recipe_allows_it(tmp_path: Path) -> None:
    folder = builders.save_family(tmp_path) / "verifier"
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "awq"}}))
    models = {"verifier": Checkpoint(model=str(folder))}
    with pytest.raises(CheckpointError, match=r"quantised \(awq\)"):
        require_full_precision(run_with(tmp_path, **models), {"capture"})
    require_full_precision(run_with(tmp_path, **models), {"qat-head"})  # the captures are there
    require_full_precision(run_with(tmp_path, **models, allow_quantised_capture=True), {"capture"})


@pytest.mark.parametrize(
    ("section", "field"),
    [("capture", "max_new_tokens"), ("capture", "validation_max_new_tokens"), ("validation", "max_new_tokens")],
)
def test_texts_that_leave_the_verifiers_context_are_named(tmp_path: Path, section: str, field: str) -> None:
    folder = builders.save_family(tmp_path) / "verifier"
    limit = json.loads((folder / "config.json").read_text())["max_position_embeddings"]
    run = run_with(tmp_path, verifier=Checkpoint(model=str(folder)))

    def asking(tokens: int) -> RunFolder:
        changed = msgspec.structs.replace(getattr(run.recipe, section), **{field: tokens})
        whole = msgspec.structs.replace(run.recipe.capture, sequence_limit=limit + 1)
        recipe = msgspec.structs.replace(run.recipe, **{"capture": whole, section: changed})
        if section == "capture":
            changed = msgspec.structs.replace(changed, sequence_limit=limit + 1)
            recipe = msgspec.structs.replace(recipe, capture=changed)
        return RunFolder(run.root, recipe, None)

    require_lengths(asking(limit - 1))
    with pytest.raises(RecipeError, match=rf"\$.{section}.{field}: {limit} tokens .* the {limit} positions"):
        require_lengths(asking(limit))


def test_an_unpinned_hub_id_is_said_with_its_commit_and_recorded(tmp_path: Path, monkeypatch) -> None:
    snapshot = tmp_path / "snapshots" / COMMIT
    shutil.copytree(builders.save_family(tmp_path) / "verifier", snapshot)
    monkeypatch.setattr("hyco_export.models.checkpoints.snapshot_download", lambda *names, **options: str(snapshot))
    notes: list[str] = []
    run = run_with(tmp_path, verifier=Checkpoint(model="owner/name"))
    note_unpinned(run, notes.append)
    assert notes == [f"$.models.verifier is not pinned: add revision: {COMMIT} to keep what this run uses"]
    assert origins(run, CAPTURE_STAGE) == {"verifier": f"owner/name@{COMMIT}"}

    notes.clear()
    note_unpinned(run_with(tmp_path, verifier=Checkpoint(model="owner/name", revision=COMMIT)), notes.append)
    assert notes == []
