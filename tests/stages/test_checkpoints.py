"""What the runner asks of checkpoints: quantised ones are refused where they teach, unpinned ones are said."""

import json
import shutil
from pathlib import Path

import builders
import msgspec
import pytest

from hyco_export.core.recipe import Checkpoint, embedded_recipe, load_recipe
from hyco_export.errors import CheckpointError
from hyco_export.stages.capture import STAGE
from hyco_export.stages.checkpoints import note_unpinned, origins, require_full_precision
from hyco_export.stages.run_folder import RunFolder

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


def test_an_unpinned_hub_id_is_said_with_its_commit_and_recorded(tmp_path: Path, monkeypatch) -> None:
    snapshot = tmp_path / "snapshots" / COMMIT
    shutil.copytree(builders.save_family(tmp_path) / "verifier", snapshot)
    monkeypatch.setattr("hyco_export.nn.checkpoint.snapshot_download", lambda *names, **options: str(snapshot))
    notes: list[str] = []
    run = run_with(tmp_path, verifier=Checkpoint(model="owner/name"))
    note_unpinned(run, notes.append)
    assert notes == [f"$.models.verifier is not pinned: add revision: {COMMIT} to keep what this run uses"]
    assert origins(run, STAGE) == {"verifier": f"owner/name@{COMMIT}"}

    notes.clear()
    note_unpinned(run_with(tmp_path, verifier=Checkpoint(model="owner/name", revision=COMMIT)), notes.append)
    assert notes == []
