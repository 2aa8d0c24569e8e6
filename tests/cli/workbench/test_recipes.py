"""Shipped recipes by their names, from any folder; vendor errors explained."""

import tomllib
from pathlib import Path

import pytest

from hyco_export.cli.options import open_run
from hyco_export.cli.workbench.doctor import explain_text
from hyco_export.cli.workbench.recipes import list_recipes, print_recipe
from hyco_export.core.recipe_loading import embedded_recipe, recipe_file, shipped_recipes
from hyco_export.errors import RecipeError
from hyco_export.graph.qnn_errors import KNOWN_ERRORS, TRAPS

ROOT = Path(__file__).parents[3]
DEVICES = ROOT / "docs" / "devices.md"


def test_a_name_means_the_shipped_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert len(shipped_recipes()) >= 5
    for name, path in shipped_recipes().items():
        assert open_run(Path(name), None).recipe.name == name == path.stem
    (tmp_path / "tiny").mkdir()  # a folder of that name is no recipe
    assert recipe_file(Path("tiny")) == embedded_recipe()
    assert open_run(Path("tiny"), None).root == Path("runs/tiny")
    (tmp_path / "tiny").rmdir()
    (tmp_path / "tiny").write_text("name: [")  # a file is
    with pytest.raises(RecipeError, match="is not YAML"):
        open_run(Path("tiny"), None)
    with pytest.raises(RecipeError, match="tinny does not exist") as refused:
        open_run(Path("tinny"), None)
    assert "gemma4-26b-a4b-sm8850" in refused.value.hint


def test_recipes_are_listed_and_printed_as_they_stand(capsys: pytest.CaptureFixture[str]) -> None:
    list_recipes()
    said = capsys.readouterr().out
    assert all(name in said for name in shipped_recipes()) and "recipes show tiny > my.yaml" in said
    print_recipe("tiny")
    assert capsys.readouterr().out == embedded_recipe().read_text(encoding="utf-8")
    with pytest.raises(RecipeError, match="no recipe called 'tinny' ships") as refused:
        print_recipe("tinny")
    assert refused.value.hint.startswith("did you mean tiny?")


def test_the_wheel_takes_along_what_is_looked_for_in_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    taken = project["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]
    assert {name: f"hyco_export/{name}" for name in ("recipes", "calibration_data", "constraints.txt")} == taken


def test_vendor_codes_are_explained(capsys: pytest.CaptureFixture[str]) -> None:
    assert explain_text("E/QNN: device create failed, error 14001") == 0
    said = capsys.readouterr().out
    assert "ADSP_LIBRARY_PATH" in said and "cause:" in said and "next:" in said
    assert explain_text("code 214001") == 1  # part of a longer number
    said = capsys.readouterr().out
    assert all(trap.symptom in said for trap in TRAPS)


def test_the_documents_table_is_the_codes() -> None:
    """Every entry of the table stands in docs/devices.md."""
    text = DEVICES.read_text(encoding="utf-8")
    assert not [known.text for known in KNOWN_ERRORS if f"`{known.text}`" not in text]
    assert not [trap.symptom for trap in TRAPS if trap.symptom not in text]
