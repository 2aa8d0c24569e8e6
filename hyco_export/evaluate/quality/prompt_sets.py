"""Prompt sets apart from the recipe's data: questions of one or more turns, read from a file or from the Hub.

A set is named as NAME, NAME:FILE or FILE, where FILE is a path or an address on the Hub:

- `spec-bench:question.jsonl`: Spec-Bench in its own layout (Xia et al. 2024); MT-bench's 80 of 480 have two turns.
- `infinitebench-sum`, `infinitebench-sum:longbook_sum_eng.jsonl`: novels to summarise (`novels.py`).
- `questions.jsonl` (also `.jsonl.gz`, `.parquet`, or a folder of them): conversations of `messages`.
- `prompts.txt`, `prompts.md`: a prompt a paragraph; paragraphs stand apart by an empty line.

An assistant's turn in the middle of a conversation is not taken from the file: it is the system's own answer.
"""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from hyco_export.core.artifact import content_digest
from hyco_export.core.data.conversations import ASSISTANT_ROLES, USER_ROLE, Conversation, Message, prompt_messages
from hyco_export.core.data.prompts import read_prompts
from hyco_export.errors import HycoError
from hyco_export.evaluate.quality.novels import NOVELS, read_novels
from hyco_export.evaluate.quality.set_files import find_file, is_address, json_rows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

SPEC_BENCH = "spec-bench"
MT_BENCH = "mt-bench"
MT_BENCH_CATEGORIES = frozenset(
    ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
)
TEXT_SUFFIXES = (".txt", ".md")
PARAGRAPH = re.compile(r"\n[ \t]*\n")
SPEC_BENCH_FORM = 'one JSON object a line: {"question_id": 81, "category": "writing", "turns": ["..."]}'
SPEC_BENCH_SOURCE = (
    "give spec-bench:FILE, a path to question.jsonl of github.com/hemingkx/Spec-Bench (data/spec_bench), "
    "or hf://datasets/OWNER/NAME@REVISION/question.jsonl"
)


class Question(msgspec.Struct, frozen=True):
    """What is asked, turn by turn: the messages that come before each of the system's answers.

    `references` are alternatives, any of which is right, for the answer of the first turn.
    """

    id: str
    task: str
    category: str  # finer than the task: MT-bench has eight
    turns: tuple[tuple[Message, ...], ...]
    references: tuple[str, ...] = ()

    def asked(self, turn: int) -> str:
        """The user's words of a turn, from 1."""
        return self.turns[turn - 1][-1].content


class Selection(msgspec.Struct, frozen=True):
    """Which questions of a set are asked: the first of each category, then the first of all."""

    per_category: int | None = None
    limit: int | None = None

    def of(self, questions: Iterable[Question]) -> tuple[Question, ...]:
        """In the set's order."""
        counts: Counter[str] = Counter()
        chosen = []
        for question in questions:
            counts[question.category] += 1
            if self.per_category is None or counts[question.category] <= self.per_category:
                chosen.append(question)
        return tuple(chosen[: self.limit])


def questions_digest(questions: Sequence[Question]) -> str:
    """Of everything that is asked, in its order; references are not asked."""
    return content_digest([(one.id, [[(m.role, m.content) for m in turn] for turn in one.turns]) for one in questions])


def check_set(text: str) -> None:
    """Said before a server is started.

    Raises:
        HycoError: no set of that name, or no such file.
    """
    name, place = _split(text)
    if place is None:
        if name == SPEC_BENCH:
            raise HycoError(f"--prompts {text} names no file", SPEC_BENCH_SOURCE)
    elif not is_address(place) and not Path(place).exists():
        known = f"a set is a number, {SPEC_BENCH}:FILE, {NOVELS}[:FILE], or a .jsonl, .parquet, .txt or .md file"
        raise HycoError(f"--prompts {text}: {place} does not exist", known)


def read_set(text: str, tokenizer: "PreTrainedTokenizerFast", novel_tokens: int) -> tuple[Question, ...]:
    """All questions of a set.

    Args:
        text: the set's name, as in the module's first lines.
        tokenizer: counts the novels' tokens.
        novel_tokens: of a prompt with a novel, at most.

    Raises:
        HycoError: no such set or file, or not of its layout.
    """
    check_set(text)
    name, place = _split(text)
    if name == SPEC_BENCH:
        assert place is not None
        found = spec_bench(find_file(place))
    elif name == NOVELS:
        found = tuple(_novel_questions(place, tokenizer, novel_tokens))
    else:
        assert place is not None
        file = find_file(place)
        found = text_prompts(file) if file.name.lower().endswith(TEXT_SUFFIXES) else conversations(file)
    if not found:
        raise HycoError(f"--prompts {text} holds no question", "give a set with at least one")
    _require_unique(found, text)
    return found


def set_name(text: str) -> str:
    """The set without the place of its file: questions are known by their digest."""
    name, place = _split(text)
    return name or Path(place or "").name


def _split(text: str) -> tuple[str, str | None]:
    """Name and file of a set; the name is empty for a file alone."""
    for name in (SPEC_BENCH, NOVELS):
        if text == name:
            return name, None
        if text.startswith(f"{name}:"):
            return name, text.removeprefix(f"{name}:")
    return "", text


def _require_unique(questions: Iterable[Question], text: str) -> None:
    seen: set[str] = set()
    for question in questions:
        if question.id in seen:
            raise HycoError(f"--prompts {text} holds question {question.id!r} twice", "remove one of them")
        seen.add(question.id)


class _SpecBenchRow(msgspec.Struct, frozen=True):
    question_id: int | str
    category: str
    turns: tuple[str, ...]
    reference: list[str | list[str]] | None = None


def spec_bench(path: Path) -> tuple[Question, ...]:
    """Spec-Bench's questions; the eight categories of MT-bench are one task.

    MT-bench's references are one for each turn and meant for a judge, so that they are left out.

    Raises:
        HycoError: not of that layout.
    """
    found = []
    for row in json_rows(path, _SpecBenchRow, SPEC_BENCH_FORM):
        task = MT_BENCH if row.category in MT_BENCH_CATEGORIES else row.category
        turns = tuple((Message(USER_ROLE, text),) for text in row.turns)
        references = () if task == MT_BENCH else _flat(row.reference or [])
        found.append(Question(str(row.question_id), task, row.category, turns, references))
    return tuple(found)


def _flat(values: Sequence[str | Sequence[str]]) -> tuple[str, ...]:
    """Alternatives stand in a list, in some files in a list within the list."""
    return tuple(text for value in values for text in ((value,) if isinstance(value, str) else value))


def _novel_questions(place: str | None, tokenizer: "PreTrainedTokenizerFast", novel_tokens: int) -> Iterable[Question]:
    for novel in read_novels(place, tokenizer, novel_tokens):
        yield Question(novel.id, NOVELS, NOVELS, ((Message(USER_ROLE, novel.prompt),),), novel.summaries)


def conversations(path: Path) -> tuple[Question, ...]:
    """Conversations of `messages`, whose task is the file's name.

    Raises:
        HycoError: not of that layout, or one without a turn to answer.
    """
    task = path.name.split(".")[0]
    return tuple(Question(one.id, task, task, _turns(one)) for one in read_prompts(path, "--prompts"))


def _turns(conversation: Conversation) -> tuple[tuple[Message, ...], ...]:
    """The messages before each answer; the assistant's own words are left out."""
    turns: list[list[Message]] = [[]]
    for message in prompt_messages(conversation):
        if message.role not in ASSISTANT_ROLES:
            turns[-1].append(message)
        elif turns[-1]:
            turns.append([])
    return tuple(tuple(turn) for turn in turns if turn)


def text_prompts(path: Path) -> tuple[Question, ...]:
    """A prompt a paragraph, known by its number; line breaks within a paragraph stay.

    Raises:
        HycoError: not UTF-8.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise HycoError(f"{path} is not UTF-8: {error}", "write it as UTF-8") from error
    paragraphs = [part.strip("\n") for part in PARAGRAPH.split(text.replace("\r\n", "\n")) if part.strip()]
    task = path.name.split(".")[0]
    return tuple(
        Question(str(number), task, task, ((Message(USER_ROLE, paragraph),),))
        for number, paragraph in enumerate(paragraphs, 1)
    )
