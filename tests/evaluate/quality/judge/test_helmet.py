"""HELMET's prompts from a path, its references, and its four values worked out by hand."""

from pathlib import Path

import pytest

from hyco_export.errors import HycoError
from hyco_export.evaluate.quality.judge.helmet import Book, book_messages, f1, read_books, read_prompts, read_value
from tests.support.evaluations import HELMET_PROMPTS, write_helmet

BOOK = Book(("one", "two", "three"), "the expert's summary")


def test_prompts_are_read_by_their_names_and_the_script_is_not_run(tmp_path: Path) -> None:
    prompts = read_prompts(write_helmet(tmp_path)[0])
    assert list(prompts) == ["fluency", "recall", "precision"]
    (fluency,) = book_messages("fluency", prompts, BOOK, " my summary\n")
    assert fluency == {"role": "user", "content": 'Fluent? my summary Reply like {"fluency": 1}.'}
    assert (
        "1. one\n2. two\n3. three\nSummary: my summary "
        in book_messages("recall", prompts, BOOK, "my summary")[0]["content"]
    )
    precision = book_messages("precision", prompts, BOOK, "s" * 20_000)[0]["content"]
    assert precision.startswith("Expert: the expert's summary\n") and "s" * 20_000 in precision


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("recall_prompt_book", "recall_prompt", "has no string recall_prompt_book"),
        (
            "{keypoints}",
            "{points}",
            r"recall_prompt_book has the fields \['points', 'summary'\], not keypoints, summary",
        ),
        ("Fluent? {text}", "Fluent? {text", r"fluency_prompt_book has the fields \[\], not text"),
        ("import sys", "import", "is no Python file"),
    ],
)
def test_other_scripts_are_refused(tmp_path: Path, old: str, new: str, message: str) -> None:
    path = tmp_path / "prompts.py"
    path.write_text(HELMET_PROMPTS.replace(old, new))
    with pytest.raises(HycoError, match=message) as caught:
        read_prompts(path)
    assert "eval_gpt4_summ.py" in caught.value.hint


def test_references_of_two_files_are_put_together_by_id(tmp_path: Path) -> None:
    points, summaries = tmp_path / "points.jsonl", tmp_path / "summaries.jsonl"
    points.write_text('{"id": 3, "keypoints": ["one"]}\n{"id": 4, "keypoints": []}\n\n{"id": 5, "keypoints": ["x"]}\n')
    summaries.write_text('{"id": "3", "answer": ["first", "second"]}\n{"id": 4, "answer": "only"}\n')
    assert read_books([points, summaries]) == {"3": Book(["one"], "first"), "4": Book([], "only")}
    with pytest.raises(HycoError, match="3 ids with key points, 0 with a summary, none with both"):
        read_books([points])
    points.write_text("nonsense")
    with pytest.raises(HycoError, match="is no such JSONL"):
        read_books([points])
    with pytest.raises(HycoError, match="cannot be read: No such file"):
        read_books([tmp_path / "none"])


@pytest.mark.parametrize(
    ("metric", "reply", "value"),
    [
        ("fluency", '{"fluency": 1}', 100.0),
        ("fluency", '{"fluency": 0}', 0.0),
        ("recall", 'Point 1 is there {so far}. Output: {"recall": 2}', 200 / 3),
        ("precision", '{"precision": 7, "sentence_count": 20}', 35.0),
        ("precision", '{"precision": 0, "sentence_count": 0}', 0.0),
    ],
)
def test_values_are_shares_in_points(metric: str, reply: str, value: float) -> None:
    assert read_value(metric, reply, BOOK) == pytest.approx(value)


def test_a_book_without_key_points_has_no_recall() -> None:
    assert read_value("recall", '{"recall": 0}', Book((), "")) == 0.0


@pytest.mark.parametrize(
    ("metric", "reply", "message"),
    [
        ("fluency", "fluent", "no fluency in the reply"),
        ("fluency", '{"fluency": 2}', "fluency 2 is not within 0 to 1"),
        ("recall", '{"recall": 4}', "recall 4 is not within 0 to 3"),
        ("precision", '{"precision": 3}', "no sentence_count in the reply"),
        ("precision", '{"precision": 3, "sentence_count": 2}', "precision 3 is not within 0 to 2"),
    ],
)
def test_impossible_replies_are_malformed(metric: str, reply: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"malformed: {message}"):
        read_value(metric, reply, BOOK)


def test_f1_is_the_harmonic_mean_of_a_fluent_text() -> None:
    assert f1(100.0, 50.0, 25.0) == pytest.approx(100 / 3)
    assert f1(0.0, 50.0, 25.0) == 0.0 and f1(100.0, 0.0, 0.0) == 0.0
