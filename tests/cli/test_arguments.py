"""The recipe may be given in two ways, but once."""

from pathlib import Path

from hyco_export.core.recipe_loading import embedded_recipe
from tests.cli.test_app import refused, run


def test_a_recipe_is_taken_either_way_but_once(tmp_path: Path) -> None:
    recipe = str(embedded_recipe())
    for given in ([recipe], ["--recipe", recipe]):
        done = run("capture", *given, "--dry-run", "--run", str(tmp_path / "run"))
        assert done.returncode == 0, done.stderr
        assert "embedded" not in done.stdout
    assert "two recipes" in refused("capture", recipe, "--recipe", recipe)
