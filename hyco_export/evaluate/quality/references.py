"""References from files in the sets' own layouts, matched to questions by their text.

| a row's fields | set | what a question must hold | references |
|---|---|---|---|
| `question`, `answer` (text) | GSM8K | the question | the answer, its number behind `####` |
| `question`, `answer` or `answers` (list) | NQ-Open, and the questions behind RAG | the question | the answers |
| `article`, `highlights` | CNN/DailyMail | the article | the highlights |
| `translation`: two languages | WMT14 | a sentence, in either language | the other one |

A question holds a source when it is the source, is it behind its first ": ", or has it as its last line; letters,
digits and their order count, spaces, case and punctuation do not.
"""

import re
import unicodedata
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from hyco_export.errors import HycoError
from hyco_export.evaluate.quality.prompt_sets import Question
from hyco_export.evaluate.quality.set_files import find_file, json_rows

FORM = "rows of question and answer, article and highlights, or translation"
PARQUET = ".parquet"
WORD = re.compile(r"\w+")


class Matched(msgspec.Struct, frozen=True):
    """Of one file: by task, how many questions found a reference there, of how many."""

    file: str
    tasks: dict[str, tuple[int, int]]

    def __str__(self) -> str:
        found = [f"{count} of {total} {task}" for task, (count, total) in self.tasks.items()]
        return f"{self.file}: references for {', '.join(found) or 'no question'}"


def with_references(questions: Sequence[Question], file: str) -> tuple[tuple[Question, ...], Matched]:
    """The questions with the references that the file has for them; others keep those of their set.

    Raises:
        HycoError: no such file, another layout, or no question of the set is in it.
    """
    known: dict[str, tuple[str, ...]] = {}
    for source, references in _pairs(find_file(file)):
        known.setdefault(_key(source), references)
    known.pop("", None)  # of a source without a letter, which any question would hold
    totals: Counter[str] = Counter(question.task for question in questions)
    counts: Counter[str] = Counter()
    found = []
    for question in questions:
        key = next((key for key in _keys(question) if key in known), None)
        counts[question.task] += key is not None
        found.append(question if key is None else msgspec.structs.replace(question, references=known[key]))
    if not counts.total():
        raise HycoError(f"--references {file} has no reference for any question of the set", "give the set's own file")
    return tuple(found), Matched(file, {task: (count, totals[task]) for task, count in sorted(counts.items()) if count})


def _keys(question: Question) -> Iterator[str]:
    text = question.asked(1)
    yield _key(text)
    yield _key(text.partition(": ")[2])
    yield _key(text.rstrip().rpartition("\n")[2])


def _key(text: str) -> str:
    return " ".join(WORD.findall(unicodedata.normalize("NFKC", text).casefold()))


def _pairs(path: Path) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Sources with their references.

    Raises:
        HycoError: a row of a layout that is not known.
    """
    for number, row in enumerate(_rows(path), 1):
        pairs = list(_row_pairs(row))
        if not pairs:
            raise HycoError(f"{path}, row {number} has the fields {', '.join(sorted(row))}", f"give {FORM}")
        yield from pairs


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    if path.name.lower().endswith(PARQUET):
        from pyarrow.parquet import ParquetFile

        for batch in ParquetFile(path).iter_batches():
            yield from batch.to_pylist()
    else:
        yield from json_rows(path, dict[str, Any], FORM)


def _row_pairs(row: dict[str, Any]) -> Iterator[tuple[str, tuple[str, ...]]]:
    if "article" in row and "highlights" in row:
        yield str(row["article"]), (str(row["highlights"]),)
    elif isinstance(row.get("translation"), dict) and len(row["translation"]) == 2:
        first, second = map(str, row["translation"].values())
        yield first, (second,)
        yield second, (first,)
    elif "question" in row and ("answer" in row or "answers" in row):
        answer = row.get("answer", row.get("answers"))
        yield str(row["question"]), tuple(map(str, answer)) if isinstance(answer, list) else (str(answer),)
