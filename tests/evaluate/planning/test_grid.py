"""A sweep's grid: its points, what they share, and what no recipe can have."""

import re
from pathlib import Path

import pytest

from hyco_export.core.recipe_loading import embedded_recipe, load_recipe
from hyco_export.errors import HycoError, ProtocolError, RecipeError
from hyco_export.evaluate.planning.grid import Grid, points_of, read_grid, recorded, runs_of, trace_folder, with_field

RECIPE = load_recipe(embedded_recipe())


def grid(**fields) -> Grid:
    return Grid(**fields)


def test_every_combination_is_a_point_and_then_the_single_ones() -> None:
    points = points_of(
        grid(fields={"drafting.budget": [8, 32], "head.window": [64, 128]}, points=({"system": "hyco-2p"},)), RECIPE
    )
    assert [point.number for point in points] == [1, 2, 3, 4, 5]
    sizes = [(point.recipe.drafting.budget, point.recipe.head.window, point.system) for point in points]
    assert sizes == [(8, 64, "hyco"), (8, 128, "hyco"), (32, 64, "hyco"), (32, 128, "hyco"), (32, 128, "hyco-2p")]
    assert points[0].changes == {"drafting.budget": 8, "head.window": 64}
    assert RECIPE.drafting.budget == 32


def test_points_that_differ_in_acceptance_alone_share_a_run() -> None:
    points = points_of(
        grid(
            fields={"validation.epsilon": [0.01, 0.1], "drafting.budget": [8, 32]},
            points=(
                {"rule": "typical"},
                {"rule": "exact"},
                {"system": "hyco-exact"},
                {"drafting.slm_temperature": 0.5},
            ),
        ),
        RECIPE,
    )
    runs = runs_of(points)
    assert [[point.number for point in run.points] for run in runs] == [[1, 3], [2, 4, 5, 6], [7], [8]]
    assert [recorded(run).rule for run in runs] == ["epsilon", "epsilon", "exact", "epsilon"]
    assert recorded(runs[0]).epsilon == 0.01
    assert len({trace_folder(run) for run in runs}) == 4
    wanted = [(point.acceptance.rule, point.acceptance.epsilon) for point in runs[1].points]
    assert wanted[:2] == [("epsilon", 0.01), ("epsilon", 0.1)]
    assert [rule for rule, _ in wanted[2:]] == ["typical", "exact"]


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"drafting.bugdet": 8}, RecipeError, r"\$.drafting.bugdet is no field"),
        ({"budget": 8}, RecipeError, r"\$.budget is no field"),
        ({"drafting.budget": "many"}, RecipeError, r"\$.drafting.budget: Invalid enum value 'many'"),
        ({"drafting.budget": 2.5}, RecipeError, r"\$.drafting.budget: Expected `int"),
        ({"drafting.budget": 65}, RecipeError, "drafting.budget"),
        ({"head.steps": 2}, RecipeError, r"\$.qat.unrolled_steps is 4, more than"),
        ({"rule": "lenient"}, ProtocolError, "lenient"),
        ({"system": "hyco-9p"}, HycoError, "unknown system"),
        ({"system": "synera"}, HycoError, "commits tokens unasked"),
    ],
)
def test_a_point_that_cannot_be_is_refused(changes: dict, error: type[HycoError], message: str) -> None:
    with pytest.raises(error, match=message):
        points_of(grid(points=(changes,)), RECIPE)


def test_a_field_keeps_the_rest_of_the_recipe() -> None:
    changed = with_field(RECIPE, "slm.wide_kv", ["v.*"])
    assert changed.slm.wide_kv == ("v.*",)
    assert with_field(changed, "$.slm.wide_kv", []) == RECIPE


def test_the_grid_of_the_documents_is_one(tmp_path: Path) -> None:
    text = (Path(__file__).parents[3] / "docs" / "measuring.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^```yaml\n(fields:.*?)^```$", text, re.DOTALL | re.MULTILINE)
    path = tmp_path / "grid.yaml"
    path.write_text(block)
    points = points_of(read_grid(path), RECIPE)
    assert len(points) == 12
    assert len(runs_of(points)) == 6


def test_files_are_checked(tmp_path: Path) -> None:
    path = tmp_path / "grid.yaml"
    path.write_text("fields: {drafting.budget: [8, 16]}\nprompts: 4\n")
    assert read_grid(path) == grid(fields={"drafting.budget": [8, 16]}, prompts=4)
    for text, message in (
        ("prompts: 4", "neither `fields` nor `points`"),
        ("fields: {drafting.budget: []}", "length >= 1"),
        ("feilds: {drafting.budget: [8]}", "unknown field `feilds`"),
        ("{fields: {drafting.budget: [8]}, baseline: on-device}", "asks no server"),
    ):
        path.write_text(text)
        with pytest.raises(HycoError, match=message):
            read_grid(path)


def test_an_unknown_field_is_refused_with_those_that_are_there(tmp_path: Path) -> None:
    for name, known in (("drafting.bugdet", "known there: budget, "), ("speed", "; also `system` and `rule`")):
        with pytest.raises(RecipeError, match="is no field of a recipe") as caught:
            with_field(RECIPE, name, 8)
        assert known in caught.value.hint
    path = tmp_path / "grid.yaml"
    path.write_text("field: {drafting.budget: [8]}")
    with pytest.raises(HycoError, match="unknown field `field`") as caught:
        read_grid(path)
    assert "`fields: {drafting.budget: [8, 32]}`" in caught.value.hint


def test_equal_points_are_one() -> None:
    twice = grid(fields={"drafting.budget": [8, 8, 16]}, points=({"drafting.budget": 16}, {"rule": "exact"}))
    points = points_of(twice, RECIPE)
    assert [(point.number, point.recipe.drafting.budget, point.acceptance.rule) for point in points] == [
        (1, 8, "epsilon"),
        (2, 16, "epsilon"),
        (3, RECIPE.drafting.budget, "exact"),
    ]
