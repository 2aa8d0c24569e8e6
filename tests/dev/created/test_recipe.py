"""The recipe beside created checkpoints is a valid one of its scale; a new folder appears whole or not at all."""

from pathlib import Path

import pytest

from hyco_export.core.recipe_loading import load_recipe
from hyco_export.dev.created.recipe import RECIPE_FILE, new_folder, recipe_text
from hyco_export.errors import CheckpointError
from hyco_export.models.families.released_configs import SCALES, Scale


@pytest.mark.parametrize("scale", SCALES.values(), ids=SCALES)
def test_every_scale_has_a_recipe_of_its_sizes(scale: Scale, tmp_path: Path) -> None:
    (tmp_path / RECIPE_FILE).write_text(recipe_text(scale), encoding="utf-8")
    recipe = load_recipe(tmp_path / RECIPE_FILE)
    assert recipe.name == f"created-{scale.name}"
    assert recipe.keepset.size == scale.run.keepset < scale.vocab_size
    assert recipe.head is not None and recipe.head.window == scale.run.window
    assert recipe.slm is not None and recipe.slm.sliding_ring == scale.run.window // 2
    assert (recipe.qat.steps, recipe.qat.clip_ratio_count) == (scale.run.qat_steps, scale.run.clip_ratios)
    assert recipe.capture.max_new_tokens == scale.run.new_tokens


def test_a_new_folder_takes_its_name_at_the_end(tmp_path: Path) -> None:
    with new_folder(tmp_path / "out") as partial:
        (partial / "file").write_text("x")
        assert not (tmp_path / "out").exists()
    assert (tmp_path / "out" / "file").read_text() == "x"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_what_an_interrupted_call_left_is_replaced(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), new_folder(tmp_path / "out") as partial:
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []
    partial.mkdir()
    (partial / "old").write_text("of a killed call")
    with new_folder(tmp_path / "out"):
        pass
    assert list((tmp_path / "out").iterdir()) == []


def test_an_existing_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="exists already"), new_folder(tmp_path):
        raise AssertionError("the block must not run")
