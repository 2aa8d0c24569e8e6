"""Prompt sets: usable alone, and with nothing in common."""

import gzip
import json
from pathlib import Path

import pytest

from hyco_export.core.data.conversations import Identities, identities
from hyco_export.core.data.prompts import read_prompts, require_counted, require_prompts
from hyco_export.core.data.readers import read_conversations
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


NOBODY = Identities(frozenset(), frozenset())


def write_turns(path: Path, *conversations: list[tuple[str, str]]) -> Path:
    lines = [{"messages": [{"role": role, "content": text} for role, text in turns]} for turns in conversations]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.mark.parametrize(
    ("turns", "part", "hint"),
    [
        ([("human", "x"), ("gpt", "y")], "has turns of 'gpt', 'human'", "ShareGPT calls human and gpt"),
        ([("user", "x"), ("gpt", "y")], "has turns of 'gpt'", "user, assistant, model"),
        ([("system", "x")], "no user speaks in it, only system", "remove it"),
        ([("user", " \n")], "the last one has no text", "remove it"),
        ([], "has no turn to answer", "remove it"),
    ],
)
def test_a_prompt_that_asks_nothing_is_named_with_its_place(tmp_path, turns, part, hint):
    path = write_turns(tmp_path / "p.jsonl", [("user", "Well?")], turns)
    with pytest.raises(RecipeError) as caught:
        read_prompts(path, "$.data.validation")
    assert caught.value.message.startswith(f"$.data.validation: {path}: conversation 2 (")
    assert part in caught.value.message and hint in caught.value.hint


def test_conversations_without_an_assistants_text_are_refused_with_the_roles_found(tmp_path):
    path = write_turns(tmp_path / "c.jsonl", [("human", "x"), ("gpt", "y")], [("human", "z")])
    with pytest.raises(RecipeError, match=r"none of 2 conversations .* \(turns: 2 of 'human', 1 of 'gpt'\)") as caught:
        require_counted(read_conversations(path), "$.data.conversations", NOBODY)
    assert "ShareGPT" in caught.value.hint
    path = write_turns(tmp_path / "c.jsonl", [("user", "x"), ("assistant", " ")])
    with pytest.raises(RecipeError, match="none of 1 conversations") as caught:
        require_counted(read_conversations(path), "$.data.conversations", NOBODY)
    assert "the assistant's answers" in caught.value.hint


def test_conversations_that_all_calibrate_are_refused(tmp_path):
    path = write_turns(tmp_path / "c.jsonl", [("user", "x"), ("assistant", "y")])
    with pytest.raises(RecipeError, match="1 calibrate or validate and are not counted"):
        require_counted(read_conversations(path), "$.data.conversations", identities(read_conversations(path)))


def test_a_part_that_counts_nothing_is_said(tmp_path):
    path = write_turns(tmp_path / "c.jsonl", [("user", "x"), ("assistant", "y")], [("human", "x"), ("gpt", "y")])
    total, (remark,) = require_counted(read_conversations(path), "$.data.conversations", NOBODY)
    assert total == 2
    assert "1 of them have turns of unknown roles: 'gpt', 'human'" in remark and "ShareGPT" in remark
    assert remark.startswith("1 of 2 conversations hold no assistant's text (turns: ") and "'gpt'" in remark
    path = write_turns(tmp_path / "c.jsonl", [("user", "x"), ("model", "y")])
    assert require_counted(read_conversations(path), "$.data.conversations", NOBODY) == (1, [])


def test_the_same_text_under_other_names_and_line_ends_is_said(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    write_turns(folder / "A.JSONL", [("user", "x"), ("assistant", "y")], [("user", "z"), ("assistant", "y")])
    content = (folder / "A.JSONL").read_bytes()
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(content))
    (folder / "b (1).jsonl").write_bytes(content + b"\n")
    found = require_counted(read_conversations(folder), "$.data.conversations", NOBODY)
    assert found == (6, ["4 of 6 conversations repeat another word for word, and are counted again"])
