"""What is refused before any stage works."""

from pathlib import Path

import msgspec
import pytest

from hyco_export.core.recipe_loading import embedded_recipe, load_recipe
from hyco_export.errors import CheckpointError, RecipeError
from hyco_export.stages.declarations import Silent, Stage
from hyco_export.stages.plan import plan
from hyco_export.stages.run_folder import RunFolder
from hyco_export.stages.runner import build_all
from tests.stages.test_runner import run_folder, stages, steps


def test_strangers_among_the_checkpoints_are_named_before_any_stage_works(source: Path, tmp_path: Path) -> None:
    recipe = load_recipe(embedded_recipe())
    strangers = msgspec.structs.replace(recipe.models, head=recipe.models.slm)
    run = RunFolder(tmp_path / "run", msgspec.structs.replace(recipe, models=strangers), None)
    with pytest.raises(CheckpointError, match="head is a 'gemma4_text' model, the head must be a gemma4_assistant"):
        build_all(run, stages(source), Silent())
    assert not list(run.root.glob("*/manifest.json"))


def test_one_file_under_two_spellings_is_no_two_sets(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"messages": [{"role": "user", "content": "x"}]}\n')
    (tmp_path / "other.jsonl").symlink_to(file)
    for other in (f"{tmp_path}/./prompts.jsonl", str(tmp_path / "other.jsonl")):
        sources = {"calibration": str(file), "validation": other}
        both = Stage("a", 1, (), steps, lambda recipe, sources=sources: sources, lambda *_: {})
        with pytest.raises(RecipeError, match=r"\$.data.validation has the same content as \$.data.calibration"):
            plan(run_folder(tmp_path), [both])


def test_conversations_are_read_to_the_end_before_any_stage_works(tmp_path: Path, source: Path) -> None:
    file = tmp_path / "conversations.jsonl"
    file.write_text('{"messages": [{"role": "user", "content": "x"}]}\nno conversation\n')
    last = Stage("k", 1, ("a",), steps, lambda recipe: {"conversations": str(file)}, lambda *_: {})
    run = run_folder(tmp_path)
    with pytest.raises(RecipeError, match=rf"\$.data.conversations: {file}: conversations.jsonl, line 2"):
        build_all(run, [stages(source)[0], last], Silent())
    assert not (run.root / "a").exists()
