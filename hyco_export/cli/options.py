"""What the command line says of a recipe and its run folder."""

from pathlib import Path

import msgspec

from hyco_export.cli.console import LiteralConsole, output
from hyco_export.core.recipe import Validation
from hyco_export.core.recipe_loading import check_recipe, embedded_recipe, load_recipe, recipe_file
from hyco_export.core.targets import find_target
from hyco_export.device.systems import find_baseline, find_system
from hyco_export.errors import ArtifactError, HycoError, RecipeError
from hyco_export.stages.run_folder import RunFolder


def open_run(
    recipe_path: Path | None, run_dir: Path | None, target: str | None = None, notes: LiteralConsole = output
) -> RunFolder:
    """The run folder of a recipe; says so, on `notes`, when it is the embedded one.

    Raises:
        RecipeError: the recipe cannot be used.
    """
    if recipe_path is None:
        notes.print("recipe: the embedded tiny family (give --recipe for another)")
    file = recipe_file(recipe_path) if recipe_path else embedded_recipe()
    recipe = load_recipe(file)
    if target is not None:
        recipe = msgspec.structs.replace(recipe, target=find_target(target).name)
        check_recipe(recipe)
    require_known_systems(recipe.validation)
    folder = _paths_start(file) if recipe_path else None
    return RunFolder(run_dir or Path("runs") / recipe.name, recipe, folder)


def _paths_start(recipe_path: Path) -> Path:
    """Where a recipe's relative paths start: its folder; of a pipe (`/dev/stdin`, `<(...)`) the working folder."""
    return recipe_path.resolve().parent if recipe_path.is_file() else Path.cwd()


def require_readable_twice(recipe_path: Path | None) -> None:
    """Of a command that starts a server, which reads the recipe again.

    Raises:
        RecipeError: it comes from a pipe.
    """
    if recipe_path is not None and not recipe_path.is_file() and recipe_path.exists():
        message = f"recipe {recipe_path} is a pipe, which can be read once; the server that is started reads it again"
        raise RecipeError(message, "write it to a file and give that")


def require_built(run: RunFolder) -> None:
    """Before anything is read: a folder that is not there is a misspelt one, or a run that was not built.

    Raises:
        ArtifactError: no such folder.
    """
    if not run.root.is_dir():
        raise ArtifactError(f"run folder {run.root} does not exist", "correct --run, or build it: hyco-export compile")


def require_known_systems(plan: Validation) -> None:
    """Before anything is built.

    Raises:
        RecipeError: a name that is no system, a baseline without server time, or a text that nobody verifies.
    """
    for field, names in (("systems", plan.systems), ("greedy_systems", plan.greedy_systems)):
        for name in names:
            try:
                system = find_system(name)
            except HycoError as error:
                raise RecipeError(f"$.validation.{field}: {error.message}", error.hint) from error
            if field == "greedy_systems" and not system.verifies_all:
                raise RecipeError(
                    f"$.validation.{field}: {name} keeps tokens unverified, its text need not be plain decoding's",
                    "take it out",
                )
    try:
        find_baseline(plan.systems[0])
    except HycoError as error:
        raise RecipeError(f"$.validation.systems: {error.message}", error.hint) from error
