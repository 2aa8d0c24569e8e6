"""A sweep's grid: fields of a recipe with the values to try, the points that they make, and which points share a run.

Points that differ in nothing but how drafts are accepted share one run's trees, judged again by each rule
(`evaluate.replay`); points that differ in nothing that an artifact is made from share artifacts and server.
"""

from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from hyco_export.core.artifact import content_digest
from hyco_export.core.recipe import Recipe
from hyco_export.core.recipe_loading import check_recipe
from hyco_export.core.recipe_sections import Count, Section
from hyco_export.device.systems import System, find_baseline, find_system
from hyco_export.errors import HycoError, RecipeError
from hyco_export.evaluate.planning.inputs import read_values
from hyco_export.protocol import wire
from hyco_export.protocol.acceptance import EPSILON, RULES, STOP_NEEDS_DRAW, check_acceptance

SYSTEM, RULE = "system", "rule"  # fields that are no recipe's
GRID_HINT = (
    "a grid is like `fields: {drafting.budget: [8, 32]}` or `points: [{rule: exact}]`;"
    " system, baseline, prompts, max_new_tokens and backend may stand beside those"
)
KEY_DIGITS = 12  # of a digest, in a folder's name


class Grid(Section, frozen=True):
    """The file. `fields`: a recipe's field by its path (`drafting.budget`), `system` or `rule`, and its values; every
    combination is a point. `points`: further ones, field by field."""

    fields: dict[str, Annotated[list[Any], Meta(min_length=1)]] = msgspec.field(default_factory=dict)
    points: tuple[dict[str, Any], ...] = ()
    system: str = "hyco"  # where no point names one
    baseline: str = "cloud-mtp"
    prompts: Count | None = None  # None: the recipe's, as the next one
    max_new_tokens: Count | None = None
    backend: str = "onnx-cpu"


class Point(msgspec.Struct, frozen=True):
    """One configuration: what it changes, the recipe with that, and how its drafts are accepted."""

    number: int
    changes: dict[str, Any]
    recipe: Recipe
    system: str
    acceptance: wire.Acceptance


class Run(msgspec.Struct, frozen=True):
    """Generations that are made once: the points that they serve; the first point's recipe is run."""

    key: str
    recipe: Recipe
    system: str
    points: tuple[Point, ...]


def read_grid(path: Path) -> Grid:
    """Read and check the file.

    Raises:
        HycoError: it cannot be read, an unknown key, or no field and no point.
    """
    try:
        grid = msgspec.convert(read_values(path), Grid)
    except msgspec.ValidationError as error:
        raise HycoError(f"{path}: {error}", GRID_HINT) from error
    if not grid.fields and not grid.points:
        raise HycoError(f"{path} has neither `fields` nor `points`", "give values of at least one field")
    find_baseline(grid.baseline)
    return grid


def points_of(grid: Grid, recipe: Recipe) -> tuple[Point, ...]:
    """Every combination of the fields' values, then the single points; of equal ones the first.

    Raises:
        HycoError: an unknown field, system or rule, or a value that the recipe cannot have.
    """
    names = list(grid.fields)
    combined = [dict(zip(names, values, strict=True)) for values in product(*grid.fields.values())] if names else []
    found: dict[str, Point] = {}
    for changes in (*combined, *grid.points):
        point = _point(len(found) + 1, changes, grid, recipe)
        found.setdefault(content_digest([point.system, point.acceptance, point.recipe]), point)
    return tuple(found.values())


def runs_of(points: Sequence[Point]) -> tuple[Run, ...]:
    """The runs that serve all points, in the order of their first points."""
    found: dict[str, list[Point]] = {}
    for point in points:
        found.setdefault(_run_key(point), []).append(point)
    return tuple(Run(key, same[0].recipe, same[0].system, tuple(same)) for key, same in found.items())


def _point(number: int, changes: Mapping[str, Any], grid: Grid, recipe: Recipe) -> Point:
    system = find_system(str(changes.get(SYSTEM, grid.system)))
    if not system.verifies_all:
        raise HycoError(f"{system.name} commits tokens unasked: it has no rounds to compare", "sweep another system")
    changed = recipe
    for name, value in changes.items():
        if name not in (SYSTEM, RULE):
            changed = with_field(changed, name, value)
    check_recipe(changed)
    rule = str(changes.get(RULE, system.rule))
    return Point(number, dict(changes), changed, system.name, acceptance(rule, changed))


def with_field(recipe: Recipe, name: str, value: Any) -> Recipe:
    """The recipe with one field changed, by its path.

    Raises:
        RecipeError: no such field, or a value of another kind.
    """
    values = msgspec.to_builtins(recipe)
    *sections, last = name.removeprefix("$.").split(".")
    place = known = values
    for section in sections:
        place = place.get(section) if isinstance(place, dict) else None
        known = place if isinstance(place, dict) else known
    if not isinstance(place, dict) or last not in place:
        also = "; also `system` and `rule`" if known is values else ""
        raise RecipeError(f"$.{name} is no field of a recipe", f"known there: {', '.join(known)}{also}")
    place[last] = value
    try:
        return msgspec.convert(values, Recipe)
    except msgspec.ValidationError as error:
        raise RecipeError(f"$.{name}: {error}", "correct the value in the grid") from error


def acceptance(rule: str, recipe: Recipe) -> wire.Acceptance:
    """A rule with those of the recipe's options that it reads.

    Raises:
        ProtocolError: no such rule.
    """
    values = {EPSILON: recipe.validation.epsilon, STOP_NEEDS_DRAW: recipe.drafting.stop_needs_draw}
    reads = RULES[rule].options if rule in RULES else frozenset()
    given: dict[str, Any] = {name: value for name, value in values.items() if name in reads}
    settings = msgspec.structs.replace(wire.EXACT, rule=rule, **given)
    check_acceptance(settings)
    return settings


def recorded(run: Run) -> wire.Acceptance:
    """How the run's own generations accept."""
    system: System = find_system(run.system)
    return acceptance(system.rule, run.recipe)


def trace_folder(run: Run) -> str:
    """Name of the folder of a run's traces."""
    return f"traces-{run.key[:KEY_DIGITS]}"


def _run_key(point: Point) -> str:
    """Of all that changes a generation beside its acceptance."""
    values = msgspec.to_builtins(point.recipe)
    del values["validation"]["epsilon"], values["drafting"]["stop_needs_draw"]
    return content_digest([point.system, values])
