"""`--prompts` and the options beside it."""

from pathlib import Path

import pytest

from hyco_export.cli.measure.set_options import SetOptions
from hyco_export.errors import HycoError


def test_a_number_is_of_the_recipes_prompts_and_anything_else_a_set() -> None:
    assert (SetOptions("60").count, SetOptions("60").is_set) == (60, False)
    assert (SetOptions().count, SetOptions().is_set) == (None, False)
    assert (SetOptions("spec-bench:60").count, SetOptions("spec-bench:60").is_set) == (None, True)
    for text in ("0", "-3"):
        with pytest.raises(HycoError, match=f"--prompts is {text}, it must be at least 1"):
            _ = SetOptions(text).count


def test_options_that_want_a_set_are_refused_without_one(tmp_path: Path) -> None:
    for options, name in (
        (SetOptions("5", per_category=1), "--per-category"),
        (SetOptions(limit=1), "--limit"),
        (SetOptions(truncate=20), "--truncate"),
    ):
        with pytest.raises(HycoError, match=f"{name} needs a set of questions"):
            options.check()
        options.check(selects_prompts=True)
    (tmp_path / "p.txt").write_text("A prompt.")
    SetOptions(str(tmp_path / "p.txt"), per_category=1, limit=1, truncate=20).check()
    with pytest.raises(HycoError, match="does not exist"):
        SetOptions(str(tmp_path / "q.txt")).check()
