"""What the command line says of a recipe: its target, its systems, its run folder."""

import re
from pathlib import Path

import pytest

from hyco_export.core.recipe_loading import embedded_recipe
from tests.cli.test_app import refused


def test_a_wrong_target_option_is_not_blamed_on_the_recipe() -> None:
    message = refused("compile", "--target", "sm9999", "--dry-run")
    assert "unknown target 'sm9999'" in message
    assert "$.target" not in message


@pytest.mark.parametrize(
    ("field", "systems", "message"),
    [
        ("systems", "[cloud-mtp, hycoo]", "$.validation.systems: unknown system 'hycoo'"),
        ("systems", "[on-device, hyco]", "$.validation.systems: on-device asks no server"),
        ("greedy_systems", "[hyco-exact, synera]", "$.validation.greedy_systems: synera keeps tokens unverified"),
    ],
)
def test_systems_of_a_recipe_that_cannot_be_compared_are_refused_before_anything_is_built(
    tmp_path: Path, field: str, systems: str, message: str
) -> None:
    text = embedded_recipe().read_text(encoding="utf-8")
    recipe = tmp_path / "recipe.yaml"
    text, count = re.subn(rf"  {field}: \[.*\]", f"  {field}: {systems}", text)
    assert count == 1
    recipe.write_text(re.sub(r"min_mat: \{.*\}", "min_mat: {}", text), encoding="utf-8")
    assert message in " ".join(refused("run", str(recipe), "--dry-run").split())
