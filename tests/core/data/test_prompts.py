"""Prompt sets: usable alone, and with nothing in common."""

import json

import pytest

from hyco_export.core.data.prompts import read_prompts, require_prompts
from hyco_export.errors import RecipeError


def write(path, questions, role="user"):
    lines = [{"id": name, "messages": [{"role": role, "content": text}]} for name, text in questions]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_good_sets_pass(tmp_path):
    calibration = write(tmp_path / "c.jsonl", [("c", "What is a list?")])
    validation = write(tmp_path / "v.jsonl", [("v", "What is a set?"), ("w", "What is a dict?")])
    require_prompts(calibration, validation, 2)


def test_more_prompts_than_there_are_is_refused(tmp_path):
    calibration = write(tmp_path / "c.jsonl", [("c", "What is a list?")])
    validation = write(tmp_path / "v.jsonl", [("v", "What is a set?")])
    with pytest.raises(RecipeError, match=r"\$.validation.prompts is 2, but .*v.jsonl holds 1") as caught:
        require_prompts(calibration, validation, 2)
    assert "at most 1" in caught.value.hint


@pytest.mark.parametrize("same", [("c", "Another?"), ("v", "what is  a list?")])
def test_a_prompt_in_both_sets_is_refused_by_id_and_by_text(tmp_path, same):
    calibration = write(tmp_path / "c.jsonl", [("c", "What is a list?")])
    validation = write(tmp_path / "v.jsonl", [("u", "What is a set?"), same])
    with pytest.raises(RecipeError, match=rf"\$.data.validation: conversation '{same[0]}' also calibrates"):
        require_prompts(calibration, validation, 1)


def test_sets_that_cannot_be_used_are_named_with_their_field(tmp_path):
    def refused(path, part):
        with pytest.raises(RecipeError) as caught:
            read_prompts(path, "$.data.calibration")
        assert part in caught.value.message

    refused(write(tmp_path / "empty.jsonl", []), "$.data.calibration: ")
    refused(write(tmp_path / "twice.jsonl", [("a", "x"), ("a", "y")]), "holds 'a' twice, ids must be unique")
    refused(write(tmp_path / "answers.jsonl", [("a", "x")], "assistant"), "'a' has no turn to answer")
    refused(tmp_path / "none.jsonl", "$.data.calibration: ")
    (tmp_path / "checkpoint").mkdir()
    refused(tmp_path / "checkpoint", "$.data.calibration: folder")
