"""Recipes as values: every shipped one decodes, and what a recipe without a head asks for."""

from pathlib import Path

import msgspec
import pytest
import yaml

from hyco_export.core.recipe import Recipe
from hyco_export.core.recipe_loading import embedded_recipe, load_recipe
from hyco_export.errors import RecipeError

RECIPES = sorted(embedded_recipe().parent.glob("*.yaml"))


def test_shipped_recipes_are_found() -> None:
    assert embedded_recipe() in RECIPES


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_shipped_recipes_decode(path: Path) -> None:
    assert load_recipe(path).name == path.stem


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_survives_a_round_trip(path: Path) -> None:
    recipe = load_recipe(path)
    assert msgspec.convert(msgspec.to_builtins(recipe), Recipe) == recipe


def test_a_coverage_takes_the_place_of_the_size(tmp_path: Path) -> None:
    content = yaml.safe_load(embedded_recipe().read_text())
    content["keepset"] = {"coverage": 0.99}
    path = tmp_path / "coverage.yaml"
    path.write_text(yaml.safe_dump(content))
    assert (load_recipe(path).keepset.size, load_recipe(path).keepset.coverage) == (None, 0.99)
    content["keepset"]["held_out_share"] = 0.0
    path.write_text(yaml.safe_dump(content))
    with pytest.raises(RecipeError, match=r"\$.keepset.held_out_share is 0, but \$.keepset.coverage"):
        load_recipe(path)
