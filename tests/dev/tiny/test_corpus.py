"""The training text: deterministic, without the held-out subjects, and so are the prompt sets."""

import ast
import hashlib
import json
import re
from pathlib import Path

import pytest

from hyco_export.dev.tiny.corpus import HELD_OUT_NAMES, held_out_corpus, invented_questions, training_corpus
from hyco_export.dev.tiny.documentation import DocumentedName, _documented, documented_names, reference_chapters

CALIBRATION = Path(__file__).parents[3] / "calibration_data"


@pytest.fixture(scope="module")
def corpus():
    return training_corpus()


def prompts(name: str) -> list[str]:
    lines = (CALIBRATION / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["messages"][0]["content"] for line in lines]


def asks_about(text: str, subject: str) -> bool:
    return re.search(rf"(?<![\w.]){re.escape(subject)}(?![\w])(?!\.\w)", text) is not None


def test_corpus_is_large_and_its_ids_are_unique(corpus):
    assert len(corpus) > 4000
    assert len({dialogue.id for dialogue in corpus}) == len(corpus)
    assert all(turn["content"].strip() for dialogue in corpus for turn in dialogue.messages)


def test_corpus_is_deterministic(corpus):
    documented_names.cache_clear()
    assert training_corpus() == corpus


def test_held_out_subjects_exist_and_are_left_out(corpus):
    assert {subject.name for subject in documented_names()} & HELD_OUT_NAMES == HELD_OUT_NAMES
    assert len(held_out_corpus()) == len(HELD_OUT_NAMES) > 100
    trained = {dialogue.id.removeprefix("stdlib/") for dialogue in corpus}
    assert not trained & HELD_OUT_NAMES


def test_invented_questions_name_nothing_that_exists():
    questions = [message["content"] for message in invented_questions(300)]
    assert questions == [message["content"] for message in invented_questions(300)]
    assert len(set(questions)) == 300
    dotted = {subject.name for subject in documented_names() if "." in subject.name}
    words = {word.rstrip(".?,") for question in questions for word in question.split()}
    assert not words & dotted


def test_calibration_sets_are_disjoint_and_validation_is_held_out():
    train, validation = prompts("train"), prompts("validation")
    assert len(set(train)) == len(train) == len(set(validation)) == len(validation) == 60
    for prompt in validation:
        assert any(asks_about(prompt, subject) for subject in HELD_OUT_NAMES), prompt
    for prompt in train:
        assert not any(asks_about(prompt, subject) for subject in HELD_OUT_NAMES), prompt


def test_calibration_readme_names_the_digests():
    readme = (CALIBRATION / "README.md").read_text(encoding="utf-8")
    for name in ("train", "validation"):
        assert hashlib.sha256((CALIBRATION / f"{name}.jsonl").read_bytes()).hexdigest() in readme


def test_documented_names_of_a_module():
    source = '''
def visible(a, b: int = 2, *, c=None):
    """Says enough to be worth an answer."""
def _hidden():
    """Says enough to be worth an answer."""
def short():
    """Too short."""
class Thing:
    """Says enough to be worth an answer."""
    def method(self, x):
        """Says enough to be worth an answer."""
    def bare(self):
        """Says enough to be worth an answer."""
'''
    doc = "Says enough to be worth an answer."
    assert list(_documented(ast.parse(source), "m", owner="")) == [
        DocumentedName("m.visible", "m", "", "function", "(a, b=2, *, c=None)", doc),
        DocumentedName("m.Thing", "m", "", "class", "", doc),
        DocumentedName("m.Thing.method", "m", "Thing", "method", "(x)", doc),
        DocumentedName("m.Thing.bare", "m", "Thing", "method", "()", doc),
    ]


def test_chapters_have_no_underlines():
    chapters = reference_chapters()
    assert len(chapters) > 60
    assert not any(text.startswith("***") for text in chapters.values())
