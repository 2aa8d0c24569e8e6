"""Dialogues about the standard library: what the tiny family learns to say.

A question names a subject; the answer says what it is, quotes the beginning of its documentation and ends with how to
import it. The text depends on the Python version and on nothing else: choices are taken from a checksum of the
subject's name, never from a random state.
"""

import itertools
import re
import textwrap
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from hyco_export.dev.tiny.documentation import KINDS, DocumentedName, documented_names, reference_chapters

# ---- subjects held out of training

HELD_OUT_NAMES = frozenset(Path(__file__).with_name("held_out.txt").read_text(encoding="utf-8").split())


Message = dict[str, str]
"""One chat turn: `{"role": "user" | "assistant", "content": text}`."""

ANSWER_CHARS = 300
"""Length of the quoted documentation: with the sentences around it an answer is about 100 tokens."""

QUESTIONS = (
    "What does {name} do?",
    "Explain {name}.",
    "How do I use {name}?",
    "Tell me about {name}.",
    "What is {name} for?",
    "Please explain what {name} does and when to use it.",
    "I found {name} in some code. What does it do?",
    "Can you describe {name}?",
    "When would I use {name} in Python?",
    "Describe {name} for a beginner.",
    "What is {name} in Python?",
    "I am new to Python and I want to understand {name}. Can you help?",
    "Give me an overview of {name}.",
    "How does {name} work?",
    "Explain {name} to me.",
    "Tell me about {name}, please.",
    "My script calls {name}. Please explain what it does.",
    "What does {name} do, and what does it return?",
    "Which module is {name} in, and what is it good for?",
    "Is {name} part of the standard library? What does it do?",
)

SHORT_QUESTIONS = (
    "In one sentence, what does {name} do?",
    "Summarize {name} in one sentence.",
    "Briefly, what is {name}?",
    "Give me a short summary of {name}.",
)
"""Questions answered with the first sentence of the documentation."""

CHAPTER_QUESTIONS = (
    "What does the Python reference say about {name}?",
    "Explain the topic of {name} in Python.",
    "Tell me about {name}.",
)

CONTINUE_QUESTIONS = ("Please go on.", "Continue.", "What else should I know?", "Tell me more.")

SHORT_SHARE = 5
"""One subject in five is asked about with a short question."""


@dataclass(frozen=True)
class Dialogue:
    """One training conversation; `id` is stable over runs and unique."""

    id: str
    messages: tuple[Message, ...]


def training_corpus() -> list[Dialogue]:
    """All dialogues about subjects that are not held out, then those about the language reference's chapters."""
    subjects = [subject for subject in documented_names() if subject.name not in HELD_OUT_NAMES]
    return [_subject_dialogue(subject) for subject in subjects] + list(_chapter_dialogues())


def held_out_corpus() -> list[Dialogue]:
    """Dialogues about the held-out subjects, for validation losses only."""
    return [_subject_dialogue(subject) for subject in documented_names() if subject.name in HELD_OUT_NAMES]


def known_questions(count: int) -> list[Message]:
    """The first questions of `count` training dialogues at even distances."""
    corpus = training_corpus()
    return [corpus[index * len(corpus) // count].messages[0] for index in range(count)]


def invented_questions(count: int) -> list[Message]:
    """Questions about names that do not exist: the place of one subject with the name of another of its kind.

    About them the verifier must improvise, as it does about held-out subjects. What it says about the subjects it was
    trained on is surer and teaches a drafter too little: a head trained on that alone had its first token accepted in
    81 % of the rounds there, and in 67 % on held-out subjects.
    """
    subjects = documented_names()
    taken = {subject.name for subject in subjects}
    by_kind = {kind: [s for s in subjects if s.kind == kind and s.name not in HELD_OUT_NAMES] for kind in KINDS}
    questions: list[Message] = []
    numbers = itertools.count()
    while len(questions) < count:
        key = f"invented/{next(numbers)}"
        place = subjects[_choice_number(key, "place") % len(subjects)]
        donors = by_kind[place.kind]
        donor = donors[_choice_number(key, "name") % len(donors)]
        name = f"{place.name.rpartition('.')[0]}.{donor.name.rpartition('.')[2]}".removeprefix(".")
        if name not in taken:
            taken.add(name)
            phrases = SHORT_QUESTIONS if _is_short(key) else QUESTIONS
            questions.append({"role": "user", "content": _pick(phrases, key).format(name=name)})
    return questions


def _subject_dialogue(subject: DocumentedName) -> Dialogue:
    if _is_short(subject.name):
        question = _pick(SHORT_QUESTIONS, subject.name)
        answer = f"{_introduction(subject)} {_first_sentence(subject.doc)}"
    else:
        question = _pick(QUESTIONS, subject.name)
        answer = f"{_introduction(subject)}\n\n{_beginning(subject.doc)}\n\n{_import_line(subject)}"
    return Dialogue(f"stdlib/{subject.name}", _turns(question.format(name=subject.name), answer))


def _is_short(key: str) -> bool:
    return _choice_number(key, "length") % SHORT_SHARE == 0


def _introduction(subject: DocumentedName) -> str:
    """What kind of thing the subject is, in one sentence."""
    full = f"{subject.name}{subject.signature}"
    if subject.module == "builtins":
        place = f"a method of the built-in type {subject.owner}" if subject.owner else f"a built-in {subject.kind}"
    elif subject.kind == "method":
        place = f"a method of the class {subject.owner} in the {subject.module} module"
    else:
        place = f"a {subject.kind} in the {subject.module} module"
    return f"{full} is {place}."


def _import_line(subject: DocumentedName) -> str:
    if subject.module == "builtins":
        return "It is always available: no import is needed."
    return f"To use it, write: from {subject.module} import {subject.import_name}"


def _chapter_dialogues() -> Iterator[Dialogue]:
    """The reference's chapters, two consecutive passages per dialogue."""
    for title, text in reference_chapters().items():
        passages = _passages(text)
        for index in range(0, len(passages), 2):
            key = f"{title}/{index}"
            topic = title if index == 0 else f"{title}, part {index // 2 + 1}"
            turns = _turns(_pick(CHAPTER_QUESTIONS, key).format(name=topic), passages[index])
            if index + 1 < len(passages):
                turns += _turns(_pick(CONTINUE_QUESTIONS, key), passages[index + 1])
            yield Dialogue(f"reference/{key}", turns)


def _passages(text: str) -> list[str]:
    """Consecutive paragraphs of `text`, joined up to about ANSWER_CHARS each."""
    passages: list[str] = []
    for paragraph in _paragraphs(text):
        if passages and len(passages[-1]) + len(paragraph) < ANSWER_CHARS:
            passages[-1] += f"\n\n{paragraph}"
        else:
            passages.append(_cut_at_sentence(paragraph))
    return passages


def _beginning(doc: str) -> str:
    """The first paragraphs of a docstring, up to about ANSWER_CHARS; at least the beginning of the first one."""
    first, *rest = _paragraphs(doc)
    text = _cut_at_sentence(first)
    for paragraph in rest:
        if len(text) + len(paragraph) > ANSWER_CHARS:
            break
        text += f"\n\n{paragraph}"
    return text


def _paragraphs(text: str) -> list[str]:
    """Blocks between empty lines; prose is unwrapped, indented blocks and console sessions keep their lines."""
    blocks = re.split(r"\n\s*\n", text.strip("\n"))
    return [
        textwrap.dedent(block).rstrip() if _is_code(block) else " ".join(block.split())
        for block in blocks
        if block.strip()
    ]


def _is_code(block: str) -> bool:
    lines = block.split("\n")
    return lines[0].lstrip().startswith(">>>") or (
        len(lines) > 1 and all(line.startswith((" ", "\t")) for line in lines)
    )


def _cut_at_sentence(text: str) -> str:
    """`text` up to its last sentence end or line end within ANSWER_CHARS, or its words up to there."""
    if len(text) <= ANSWER_CHARS:
        return text
    head = text[:ANSWER_CHARS]
    ends = [match.end() for match in re.finditer(r"[.!?](?=\s)|\n", head)]
    return head[: ends[-1]].rstrip() if ends else head.rsplit(" ", 1)[0]


def _first_sentence(doc: str) -> str:
    paragraph = _cut_at_sentence(_paragraphs(doc)[0])
    return re.split(r"(?<=[.!?])\s", paragraph, maxsplit=1)[0]


def _turns(question: str, answer: str) -> tuple[Message, ...]:
    return ({"role": "user", "content": question}, {"role": "assistant", "content": answer})


def _pick(phrases: Sequence[str], key: str) -> str:
    return phrases[_choice_number(key, "phrase") % len(phrases)]


def _choice_number(key: str, purpose: str) -> int:
    """A number that depends on the key alone and is the same on every machine."""
    return zlib.crc32(f"{purpose}:{key}".encode())
