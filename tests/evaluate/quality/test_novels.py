"""Novels: HELMET's order, the cut, the examples."""

import json
from pathlib import Path

import pytest

from hyco_export.errors import HycoError
from hyco_export.evaluate.quality.novels import OMITTED, REQUEST, read_novels, shortened, shuffled_order
from tests.support.words import WordTokenizer

WORDS = WordTokenizer()


def test_the_order_is_that_of_datasets_shuffle() -> None:
    datasets = pytest.importorskip("datasets")
    for count in (3, 103):
        rows = datasets.Dataset.from_list([{"n": number} for number in range(count)])
        assert shuffled_order(count) == rows.shuffle(seed=42)["n"][:]


def test_a_long_text_loses_its_end_and_says_so() -> None:
    text = " ".join(f"w{number}" for number in range(20))
    cut = shortened(text, WORDS, 10)  # type: ignore[arg-type]
    assert cut.endswith(OMITTED) and cut.startswith("w0 w1")
    assert len(WORDS(cut)["input_ids"]) == 10
    assert shortened(text, WORDS, 20) == text  # type: ignore[arg-type]


def test_each_prompt_shows_two_other_summaries(tmp_path: Path) -> None:
    path = tmp_path / "novels.jsonl"
    rows = [{"id": n, "context": f"novel{n} " * 5, "answer": [f"summary{n} "], "input": ""} for n in range(60)]
    path.write_text("\n".join(map(json.dumps, rows)))
    found = list(read_novels(str(path), WORDS, 200))  # type: ignore[arg-type]
    assert [novel.id for novel in found] == [str(n) for n in shuffled_order(60)[:50]]
    for novel in found:
        assert novel.prompt.startswith(REQUEST) and f"novel{novel.id} novel" in novel.prompt
        assert novel.prompt.count("Summary: summary") == 2
        assert f"summary{novel.id}\n" not in novel.prompt  # its own would give the answer away
    path.write_text(json.dumps(rows[0]))
    (alone,) = read_novels(str(path), WORDS, 200)  # type: ignore[arg-type]
    assert "Summary:" not in alone.prompt


def test_request_examples_and_text_have_the_limit_together(tmp_path: Path) -> None:
    path = tmp_path / "novels.jsonl"
    rows = [{"id": n, "context": "word " * 300, "answer": ["long " * n]} for n in (1, 20, 40)]
    path.write_text("\n".join(map(json.dumps, rows)))
    for novel in read_novels(str(path), WORDS, 150):  # type: ignore[arg-type]
        assert len(WORDS(novel.prompt)["input_ids"]) == 150 and OMITTED in novel.prompt
    with pytest.raises(HycoError, match=r"--truncate is 50, request and examples alone have \d+ tokens"):
        list(read_novels(str(path), WORDS, 50))  # type: ignore[arg-type]
