"""Where files that come with the package lie: recipes, calibration prompts and the embedded checkpoints.

In a wheel they are inside the package; in a checkout the first two stand at the top level.
"""

from pathlib import Path

from hyco_export.errors import RecipeError

PACKAGE = Path(__file__).resolve().parent.parent
CHECKPOINTS = PACKAGE / "nn" / "tiny" / "checkpoints"
EMBEDDED_PREFIX = "embedded:"


def resource_path(relative: str) -> Path:
    """A shipped file, e.g. `recipes/tiny.yaml`.

    Raises:
        RecipeError: it is in neither place.
    """
    for root in (PACKAGE, PACKAGE.parent):
        if (root / relative).exists():
            return root / relative
    raise RecipeError(f"{relative} is not part of this installation", "reinstall hyco-export")


def locate(reference: str, recipe_folder: Path | None) -> Path | None:
    """The local path a recipe's reference means, or None when it names nothing local (a Hub id).

    `embedded:NAME` is inside the package; else an absolute path or one from `~`, a path beside the recipe, or a shipped
    file.


    Raises:
        RecipeError: `embedded:` with a path that leaves the embedded family's folder.
    """
    if reference.startswith("~"):
        return Path(reference).expanduser()
    if reference.startswith(EMBEDDED_PREFIX):
        found = (CHECKPOINTS / reference.removeprefix(EMBEDDED_PREFIX)).resolve()
        if not found.is_relative_to(CHECKPOINTS):
            raise RecipeError(
                f"{reference!r} leaves the embedded family", "name one of its files, or give a path without `embedded:`"
            )
        return found
    roots = [Path()] if recipe_folder is None else [recipe_folder, Path()]
    for root in (*roots, PACKAGE, PACKAGE.parent):
        if (root / reference).exists():
            return root / reference
    return None
