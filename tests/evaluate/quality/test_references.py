"""References from the sets' own files."""

import json
from pathlib import Path

import pytest

from hyco_export.core.data.conversations import Message
from hyco_export.errors import HycoError
from hyco_export.evaluate.quality.prompt_sets import Question
from hyco_export.evaluate.quality.references import with_references


def question(name: str, task: str, text: str, references: tuple[str, ...] = ()) -> Question:
    return Question(name, task, task, ((Message("user", text),),), references)


QUESTIONS = (
    question("1", "translation", "Translate German to English: Guten Tag , Welt !"),
    question("2", "summarization", "Summarize: A fire  broke out."),
    question("3", "math_reasoning", "How many apples?", ("#### 1",)),
    question("4", "qa", "Who played Anna in Once Upon a Time?"),
    question("5", "qa", "Who else?"),
    question("6", "rag", "Passage one.\nPassage two.\nWho sang it?"),
)


def write(path: Path, *rows: object) -> str:
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


@pytest.mark.parametrize(
    ("row", "name", "references"),
    [
        ({"translation": {"de": "Guten Tag, Welt!", "en": "Hello, world!"}}, "1", ("Hello, world!",)),
        ({"article": "A fire broke out.", "highlights": "Fire.", "id": "x"}, "2", ("Fire.",)),
        ({"question": "How many apples?", "answer": "2 and 3\n#### 5"}, "3", ("2 and 3\n#### 5",)),
        ({"question": "who played anna in once upon a time", "answer": ["E. Lail"]}, "4", ("E. Lail",)),
        ({"question": "Who sang it", "answers": ["Ann", "Bo"]}, "6", ("Ann", "Bo")),
    ],
)
def test_each_set_has_its_layout(tmp_path: Path, row: object, name: str, references: tuple[str, ...]) -> None:
    found, _ = with_references(QUESTIONS, write(tmp_path / "r.jsonl", row))
    assert {one.id: one.references for one in found if one.references} == {"3": ("#### 1",), name: references}


def test_unmatched_questions_are_told(tmp_path: Path) -> None:
    file = write(tmp_path / "nq.jsonl", {"question": "Who else", "answer": ["Me"]}, {"question": "?", "answer": ["x"]})
    found, matched = with_references(QUESTIONS, file)
    assert str(matched) == f"{file}: references for 1 of 2 qa"
    assert [one.references for one in found if one.task == "qa"] == [(), ("Me",)]


def test_files_that_help_nobody_are_refused(tmp_path: Path) -> None:
    with pytest.raises(HycoError, match="has no reference for any question"):
        with_references(QUESTIONS, write(tmp_path / "a.jsonl", {"question": "Other?", "answer": "#### 1"}))
    with pytest.raises(HycoError, match=r"row 1 has the fields label, text \(give rows of question"):
        with_references(QUESTIONS, write(tmp_path / "b.jsonl", {"text": "x", "label": 1}))


def test_parquet_is_read_too(tmp_path: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    table = arrow.Table.from_pylist([{"question": "Who else?", "answer": ["Me"]}])
    parquet.write_table(table, tmp_path / "r.parquet")
    found, _ = with_references(QUESTIONS, str(tmp_path / "r.parquet"))
    assert found[4].references == ("Me",)
