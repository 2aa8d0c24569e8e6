"""HELMET's model-based evaluation of book summaries: fluency, recall of key points, precision, F1.

Its prompts are published in a Python script (`scripts/eval_gpt4_summ.py`), as module-level strings. They are read from
there by their names, as literals: the script is neither run nor copied. Key points and expert summaries come from JSONL
files in its layout or InfiniteBench's.
"""

import ast
from collections.abc import Mapping, Sequence
from pathlib import Path
from string import Formatter
from typing import NamedTuple

import msgspec

from hyco_export.errors import HycoError
from hyco_export.evaluate.quality.judge.endpoint import Message
from hyco_export.evaluate.quality.judge.question import last_object

FLUENCY, RECALL, PRECISION, F1 = "fluency", "recall", "precision", "f1"
ASKED = (FLUENCY, RECALL, PRECISION)  # of the judge; F1 follows from them
PROMPT_NAMES = {name: f"{name}_prompt_book" for name in ASKED}
FIELDS = {FLUENCY: {"text"}, RECALL: {"keypoints", "summary"}, PRECISION: {"expert_summary", "summary"}}
SENTENCES = "sentence_count"  # of the summary, beside those that are supported
POINTS = 100.0  # values are percentage points, as in the paper's Table 9
PROMPTS_HINT = "give HELMET's scripts/eval_gpt4_summ.py, or a Python file with the same names"
REFERENCES_HINT = (
    "give JSONL with `id` and `keypoints` (HELMET's longbook_sum_eng_keypoints.jsonl) and `answer` (the same file, or "
    "InfiniteBench's longbook_sum_eng.jsonl)"
)


class Book(NamedTuple):
    """What a summary is held against."""

    key_points: Sequence[str]
    expert_summary: str


class _Reference(msgspec.Struct):
    id: int | str
    keypoints: list[str] | None = None
    answer: str | list[str] | None = None


def read_prompts(path: Path) -> dict[str, str]:
    """The prompts' templates by metric.

    Raises:
        HycoError: the file cannot be read, or does not have them with their fields.
    """
    try:
        parsed = ast.parse(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise HycoError(f"{path} cannot be read: {error.strerror}", PROMPTS_HINT) from error
    except (SyntaxError, ValueError) as error:  # UnicodeDecodeError is a ValueError
        raise HycoError(f"{path} is no Python file: {error}", PROMPTS_HINT) from error
    strings = {
        target.id: node.value.value
        for node in parsed.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for metric, name in PROMPT_NAMES.items():
        if name not in strings:
            raise HycoError(f"{path} has no string {name}", PROMPTS_HINT)
        if (found := _fields(strings[name])) != FIELDS[metric]:
            wanted = ", ".join(sorted(FIELDS[metric]))
            raise HycoError(f"{path}: {name} has the fields {sorted(found)}, not {wanted}", PROMPTS_HINT)
    return {metric: strings[name] for metric, name in PROMPT_NAMES.items()}


def read_books(paths: Sequence[Path]) -> dict[str, Book]:
    """References by id, rows of several files put together.

    Raises:
        HycoError: a file cannot be read, or no row has both parts.
    """
    points: dict[str, list[str]] = {}
    summaries: dict[str, str] = {}
    decoder = msgspec.json.Decoder(_Reference)
    for path in paths:
        try:
            with path.open("rb") as file:
                for row in (decoder.decode(line) for line in file if line.strip()):
                    if row.keypoints is not None:
                        points[str(row.id)] = row.keypoints
                    if row.answer:
                        summaries[str(row.id)] = row.answer if isinstance(row.answer, str) else row.answer[0]
        except OSError as error:
            raise HycoError(f"{path} cannot be read: {error.strerror}", REFERENCES_HINT) from error
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise HycoError(f"{path} is no such JSONL: {error}", REFERENCES_HINT) from error
    books = {name: Book(points[name], summaries[name]) for name in points if name in summaries}
    if not books:
        said = f"{len(points)} ids with key points, {len(summaries)} with a summary, none with both"
        raise HycoError(f"{', '.join(map(str, paths))}: {said}", REFERENCES_HINT)
    return books


def book_messages(metric: str, prompts: Mapping[str, str], book: Book, summary: str) -> tuple[Message, ...]:
    """The message that asks for one metric of a summary; nothing is cut."""
    summary = summary.strip()
    numbered = "\n".join(f"{number}. {point}" for number, point in enumerate(book.key_points, 1))
    values = {"text": summary, "summary": summary, "keypoints": numbered, "expert_summary": book.expert_summary}
    return ({"role": "user", "content": prompts[metric].format(**values)},)


def read_value(metric: str, reply: str, book: Book) -> float:
    """The metric of a reply, in points: of recall and precision the share of what was counted.

    Raises:
        ValueError: a number is missing or impossible.
    """
    said = last_object(reply)
    found = _number(said, metric)
    most = {FLUENCY: 1.0, RECALL: float(len(book.key_points))}.get(metric)
    if most is None:
        most = _number(said, SENTENCES)
    if not 0.0 <= found <= most:
        raise ValueError(f"malformed: {metric} {found:g} is not within 0 to {most:g}")
    return POINTS * found / most if most else 0.0


def f1(fluency: float, recall: float, precision: float) -> float:
    """The harmonic mean of recall and precision, 0 for a text that is not fluent; all in points."""
    both = recall + precision
    return fluency / POINTS * 2.0 * recall * precision / both if both else 0.0


def _number(said: Mapping[str, object], name: str) -> float:
    value = said.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"malformed: no {name} in the reply")
    return float(value)


def _fields(template: str) -> set[str]:
    """The names between a template's braces; empty for one that `str.format` does not take."""
    try:
        return {name for _, name, _, _ in Formatter().parse(template) if name is not None}
    except ValueError:
        return set()
