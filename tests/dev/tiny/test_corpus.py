"""The training text: deterministic, without the held-out subjects, and so are the prompt sets."""

import hashlib
import json
import re
from pathlib import Path

import pytest

from hyco_export.dev.tiny.corpus import HELD_OUT_NAMES, held_out_corpus, invented_questions, training_corpus
from hyco_export.dev.tiny.documentation import documented_names

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
