"""What several tests of the command line share."""

from pathlib import Path

import pytest

from hyco_export.cli import validation
from hyco_export.core.artifact import KEEPSET, Manifest, publish
from hyco_export.core.recipe_loading import embedded_recipe, load_recipe
from hyco_export.stages.run_folder import RunFolder


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    """A run folder with a damaged keep set; whatever is heavy fails the test."""
    build = tmp_path / "build"
    build.mkdir()
    (build / "keepset.safetensors").write_text("ids")
    (tmp_path / "run").mkdir()
    publish(build, tmp_path / "run" / KEEPSET, Manifest(KEEPSET, 1, "k", {}, {}, {}, {}, {}, {}, 0.1))
    (tmp_path / "run" / KEEPSET / "keepset.safetensors").write_text("idz")
    monkeypatch.setattr(validation, "require_current", lambda *_: None)
    monkeypatch.setattr(validation, "use_threads", lambda *_: pytest.fail("torch was imported"))
    return RunFolder(tmp_path / "run", load_recipe(embedded_recipe()), None)
