"""Reads a recipe: strict about keys and types, then checked by the rules."""

from pathlib import Path

import msgspec

from hyco_export.core.recipe import Recipe
from hyco_export.core.recipe_rules import check_recipe
from hyco_export.core.resources import resource_path
from hyco_export.core.yaml_file import read_yaml
from hyco_export.errors import RecipeError


def load_recipe(path: Path) -> Recipe:
    """The recipe of a YAML file, checked.

    Raises:
        RecipeError: file or pipe missing, not YAML, an unknown or repeated key, a wrong type or an impossible pair;
            names the field.
    """
    if path.is_dir():
        raise RecipeError(f"recipe {path} is a folder", "give the YAML file in it")
    try:
        recipe = msgspec.convert(read_yaml(path), Recipe, strict=True)
    except msgspec.ValidationError as error:
        raise RecipeError(f"recipe {path.name}: {error}", "see recipes/tiny.yaml for every field") from error
    check_recipe(recipe)
    return recipe


def embedded_recipe() -> Path:
    """The tiny family's recipe, shipped with the package."""
    return resource_path("recipes/tiny.yaml")
