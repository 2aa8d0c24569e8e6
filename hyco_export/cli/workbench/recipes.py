"""What `recipes` does: lists the recipes that ship, or prints one as it stands in its file."""

import difflib
import sys

from hyco_export.cli.console import output, show_next, show_rows
from hyco_export.core.recipe_loading import load_recipe, shipped_recipes
from hyco_export.errors import RecipeError


def list_recipes() -> None:
    """Print names, targets and models."""
    rows = {}
    for name, path in shipped_recipes().items():
        recipe = load_recipe(path)
        models = recipe.models
        rows[name] = {
            "target": recipe.target,
            "verifier": models.verifier.model,
            "head": models.head.model if models.head else "none",
            "SLM": models.slm.model,
        }
    show_rows("recipes", rows)
    output.print("\nuse one by its name (--recipe NAME), or begin your own with it")
    show_next("hyco-export recipes show tiny > my.yaml")


def print_recipe(name: str) -> None:
    """Write the recipe's file to stdout, comments and all.

    Raises:
        RecipeError: none of that name ships.
    """
    shipped = shipped_recipes()
    if name not in shipped:
        closest = difflib.get_close_matches(name, shipped, n=1)
        guess = f"did you mean {closest[0]}? " if closest else ""
        raise RecipeError(f"no recipe called {name!r} ships", f"{guess}those that do: {', '.join(shipped)}")
    sys.stdout.write(shipped[name].read_text(encoding="utf-8"))
