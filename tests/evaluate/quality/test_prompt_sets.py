"""Prompt sets: layouts, turns, selection, and what is refused."""

import json
from collections import Counter
from pathlib import Path

import pytest

from hyco_export.core.data.conversations import Message
from hyco_export.errors import HycoError
from hyco_export.evaluate.quality import prompt_sets
from hyco_export.evaluate.quality.evaluation_folder import turn_id
from hyco_export.evaluate.quality.prompt_sets import Question, Selection, check_set, questions_digest, read_set
from tests.support.words import WordTokenizer

SPEC_BENCH = Path(__file__).parents[4] / "shared" / "data" / "spec_bench" / "question.jsonl"
ROWS = (
    {"question_id": 81, "category": "writing", "turns": ["Write.", "Again."], "reference": ["a", "b"]},
    {"question_id": 401, "category": "math_reasoning", "turns": ["2 and 2?"], "reference": ["#### 4"]},
    {"question_id": 481, "category": "rag", "turns": ["Passages.\nWho?"], "reference": [["Ann", "Bo"]]},
    {"question_id": 321, "category": "qa", "turns": ["Who played Anna?"]},
)


def read(text: str, tokens: int = 100) -> tuple[Question, ...]:
    return read_set(text, WordTokenizer(), tokens)  # type: ignore[arg-type]


def write_rows(path: Path, rows: object = ROWS) -> Path:
    path.write_text("\n".join(map(json.dumps, rows)))  # type: ignore[call-overload]
    return path


def test_spec_bench_is_read_in_its_own_layout(tmp_path: Path) -> None:
    found = read(f"spec-bench:{write_rows(tmp_path / 'question.jsonl')}")
    assert [(one.id, one.task, one.category) for one in found] == [
        ("81", "mt-bench", "writing"),
        ("401", "math_reasoning", "math_reasoning"),
        ("481", "rag", "rag"),
        ("321", "qa", "qa"),
    ]
    assert [one.references for one in found] == [(), ("#### 4",), ("Ann", "Bo"), ()]  # MT-bench's are for a judge
    assert found[0].turns == ((Message("user", "Write."),), (Message("user", "Again."),))
    assert (found[0].asked(2), turn_id("81", 1), turn_id("81", 2)) == ("Again.", "81", "81/turn2")


@pytest.mark.skipif(not SPEC_BENCH.exists(), reason="Spec-Bench's question.jsonl is not beside the repository")
def test_the_published_spec_bench_has_480_questions_and_560_turns() -> None:
    found = read(f"spec-bench:{SPEC_BENCH}")
    assert Counter(one.task for one in found) == dict.fromkeys(
        ("mt-bench", "translation", "summarization", "qa", "math_reasoning", "rag"), 80
    )
    assert sum(len(one.turns) for one in found) == 560
    assert {one.task for one in found if not one.references} == {"mt-bench", "qa"}
    chosen = Selection(per_category=2).of(found)
    assert Counter(one.task for one in chosen)["mt-bench"] == 16 and len(chosen) == 26


def test_the_first_of_each_category_then_the_first_of_all() -> None:
    made = [Question(str(number), "t", category, ()) for number, category in enumerate("aababb")]
    assert [one.id for one in Selection().of(made)] == list("012345")
    assert [one.id for one in Selection(per_category=1).of(made)] == ["0", "2"]
    assert [one.id for one in Selection(per_category=2, limit=3).of(made)] == ["0", "1", "2"]


def test_an_assistants_turn_is_left_to_the_system(tmp_path: Path) -> None:
    messages = [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "One?"},
        {"role": "assistant", "content": "The file's own answer."},
        {"role": "user", "content": "Two?"},
        {"role": "assistant", "content": "Another."},
    ]
    path = write_rows(tmp_path / "talks.jsonl", [{"id": "a", "messages": messages}])
    (question,) = read(str(path))
    assert question == Question(
        "a", "talks", "talks", ((Message("system", "Be short."), Message("user", "One?")), (Message("user", "Two?"),))
    )


def test_a_text_file_has_a_prompt_a_paragraph(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_bytes("\ufeffFirst line,\r\nsecond line.\r\n\r\n \n\nAnother.\n".encode())
    assert [(one.id, one.asked(1)) for one in read(str(path))] == [
        ("1", "First line,\nsecond line."),
        ("2", "Another."),
    ]


def test_another_question_is_another_digest_and_a_reference_is_not_asked() -> None:
    one = Question("a", "t", "c", ((Message("user", "One?"),),))
    other = Question("a", "t", "c", ((Message("user", "Two?"),),))
    referenced = Question("a", "t", "c", one.turns, ("right",))
    assert questions_digest([one]) == questions_digest([referenced]) != questions_digest([other])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("spec-bench", r"names no file \(give spec-bench:FILE"),
        ("spec-bench:none.jsonl", "none.jsonl does not exist"),
        ("spec-bnch", r"--prompts spec-bnch: spec-bnch does not exist \(a set is a number, spec-bench:FILE"),
    ],
)
def test_what_is_no_set_is_refused_before_anything_starts(text: str, message: str) -> None:
    with pytest.raises(HycoError, match=message):
        check_set(text)


def test_a_damaged_set_names_its_row(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "q.jsonl", [ROWS[0], {"question_id": 1, "turns": ["?"]}])
    with pytest.raises(HycoError, match=r"q.jsonl, row 2: .*category"):
        read(f"spec-bench:{path}")
    write_rows(path, [ROWS[0], ROWS[0]])
    with pytest.raises(HycoError, match="holds question '81' twice"):
        read(f"spec-bench:{path}")
    path.write_text("")
    with pytest.raises(HycoError, match="holds no question"):
        read(f"spec-bench:{path}")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    with pytest.raises(HycoError, match=r"latin[.]txt is not UTF-8"):
        read(str(tmp_path / "latin.txt"))


def test_a_set_keeps_its_name_where_its_file_has_moved() -> None:
    names = [prompt_sets.set_name(text) for text in ("spec-bench:/a/q.jsonl", "infinitebench-sum", "b/talks.jsonl")]
    assert names == ["spec-bench", "infinitebench-sum", "talks.jsonl"]


def test_novels_become_questions_of_one_turn(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "novels.jsonl", [{"id": 3, "context": "It was dark.", "answer": ["Dark."]}])
    (question,) = read(f"{prompt_sets.NOVELS}:{path}")
    assert (question.id, question.task, question.references) == ("3", "infinitebench-sum", ("Dark.",))
    assert "It was dark." in question.asked(1)
