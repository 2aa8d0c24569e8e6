"""Which questions a call asks, and what is said of those that came to nothing."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from hyco_export.cli.measure.questions import Answered, prompt_limit, read_questions, show_coverage
from hyco_export.cli.measure.set_options import SetOptions
from hyco_export.errors import RecipeError
from hyco_export.evaluate.quality.evaluation_folder import Answer
from tests.evaluate.synthetic_run import KEEPSET, RECIPE
from tests.support.words import WordTokenizer


@pytest.fixture
def validation(tmp_path: Path) -> Path:
    """Four of the recipe's own prompts; it wants three."""
    rows = [{"id": f"v{n}", "messages": [{"role": "user", "content": f"Question {n}?"}]} for n in range(4)]
    path = tmp_path / "validation.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def ids(validation: Path, **options: Any) -> list[str]:
    words: Any = WordTokenizer()
    return [question.id for question in read_questions(SetOptions(**options), RECIPE, validation, words)]


def test_without_a_set_the_recipes_prompts_are_asked(validation: Path) -> None:
    assert ids(validation) == ["v0", "v1", "v2"]
    assert ids(validation, prompts="4") == ["v0", "v1", "v2", "v3"]
    assert ids(validation, prompts="4", limit=2) == ["v0", "v1"]
    with pytest.raises(RecipeError, match=r"is 5, but .* holds 4"):
        ids(validation, prompts="5")


def test_a_set_is_asked_in_its_place(validation: Path, tmp_path: Path) -> None:
    path = tmp_path / "other.txt"
    path.write_text("One.\n\nTwo.")
    assert ids(validation, prompts=str(path)) == ["1", "2"]
    assert ids(validation, prompts=str(path), per_category=1) == ["1"]


def test_a_novel_is_cut_before_it_is_a_prompt(validation: Path, tmp_path: Path) -> None:
    path = tmp_path / "novels.jsonl"
    path.write_text(json.dumps({"id": 1, "context": "word " * 90, "answer": ["Words."]}))
    asked = SetOptions(f"infinitebench-sum:{path}", truncate=60)
    words: Any = WordTokenizer()
    (question,) = read_questions(asked, RECIPE, validation, words)
    assert 10 < question.asked(1).count("word ") < 60
    assert prompt_limit(asked) is None and prompt_limit(SetOptions("x.txt", truncate=20)) == 20


def test_coverage_and_reasons_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    row = Answer("hyco", "1", "qa", "qa", 1, 0, "asked", "text")
    lost = [msgspec.structs.replace(row, question=str(n), failure=f"reason {n % 6}", text="") for n in range(2, 14)]
    plan: Any = None
    store: Any = None
    show_coverage(Answered(plan, (), store, KEEPSET, (row, *lost)))
    said = capsys.readouterr()
    assert said.out.split("\n")[0] == "coverage: hyco 1 of 13"
    assert said.err.count("failed: 2 answers: reason") == 5 and "failed: 1 other reasons" in said.err
