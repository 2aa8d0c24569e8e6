"""Metrics against values worked out by hand or by the libraries' own front ends."""

from collections.abc import Sequence
from decimal import Decimal

import pytest
import sacrebleu

from hyco_export.evaluate.quality.evaluation_folder import Answer
from hyco_export.evaluate.quality.reference_metrics import (
    BLEU_PARTS,
    bleu_parts,
    containment,
    corpus_bleu,
    last_number,
    normalised,
    numeric_accuracy,
    quality,
    rouge,
    score_answers,
)

SAID = ["The cat sat on the mat today.", "It is raining very hard outside now."]
RIGHT = ["The cat sat on the mat.", "It rains very hard outside now."]


def test_parts_of_answers_sum_up_to_sacrebleus_corpus() -> None:
    parts = [bleu_parts(said, [right]) for said, right in zip(SAID, RIGHT, strict=True)]
    assert corpus_bleu(parts) == pytest.approx(sacrebleu.corpus_bleu(SAID, [RIGHT]).score)
    assert parts[0]["bleu_matches_1"] == 7 and parts[0]["bleu_ngrams_1"] == 8  # the full stop is a token
    assert corpus_bleu(parts) > corpus_bleu(parts[1:])


def test_rouge_by_hand() -> None:
    found = rouge("a b c d", ["a x c y z"])  # common subsequence a c: precision 2/4, recall 2/5
    assert found["rougeL"] == pytest.approx(100 * 2 * 0.5 * 0.4 / 0.9)
    swapped = rouge("three four\none two", ["one two\nthree four"])  # line by line all is found
    assert swapped["rougeL"] == pytest.approx(50.0) and swapped["rougeLsum"] == pytest.approx(100.0)
    assert rouge("running dogs", ["a b", "run dog"])["rougeL"] == pytest.approx(100.0)  # stemmed, the best one


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("so 3 + 4 = 7", "7"),
        ("$1,234.50 in all.", "1234.50"),
        ("It is 12.", "12"),
        ("-5 degrees", "-5"),
        ("none", None),
        ("1,000", "1000"),
    ],
)
def test_the_last_number_counts(text: str, value: str | None) -> None:
    assert last_number(text) == (None if value is None else Decimal(value))


def test_numeric_accuracy_reads_gsm8ks_answer() -> None:
    reference = ["400*.5=$<<400*.5=200>>200\n#### 1,000"]
    assert numeric_accuracy("That makes $1000.00.", reference) == {"accuracy": 100.0}
    assert numeric_accuracy("That makes $1001.", reference) == {"accuracy": 0.0}
    assert numeric_accuracy("I do not know.", ["I neither."]) == {"accuracy": 0.0}


def test_containment_is_of_whole_normalised_words() -> None:
    assert normalised("The U.S., an  Island!") == "us island"
    assert containment("It was George Harrison's song.", ["James Ray", "the GEORGE harrisons"])["containment"] == 100.0
    assert containment("In 2014.", ["14"])["containment"] == 0.0
    assert containment("Anything", ["The"])["containment"] == 0.0  # nothing is left of it


def answer(task: str, text: str, name: str = "1", generation: int = 0, failure: str | None = None) -> Answer:
    return Answer("hyco", name, task, task, 1, generation, "asked", text, failure=failure)


def scored(answers: Sequence[Answer], **references: Sequence[str]) -> list[tuple[str, float | None, str]]:
    known = {name.removeprefix("q"): texts for name, texts in references.items()}
    return [(score.metric, score.value, score.reason) for score in score_answers(answers, known)]


def test_failures_have_no_value_and_say_why() -> None:
    failed = answer("qa", "", failure="no room")
    assert scored([failed], q1=["x"]) == [("containment", None, "no answer: no room")]
    assert [metric for metric, *_ in scored([answer("translation", "x")], q1=["x"])] == list(BLEU_PARTS)


def test_what_has_no_reference_or_metric_is_not_scored() -> None:
    later = Answer("hyco", "1", "qa", "qa", 2, 0, "asked", "x")
    assert scored([answer("qa", "x"), answer("mt-bench", "x"), later], q2=["x"]) == []
    assert scored([later], q1=["x"]) == []


def test_quality_is_the_mean_of_generations_and_fails_nothing_into_it() -> None:
    answers = [
        answer("qa", "yes", "1", 0), answer("qa", "no", "2", 0), answer("qa", "yes", "1", 1),
        answer("qa", "", "2", 1, failure="no room"),
    ]  # fmt: skip
    scores = list(score_answers(answers, {"1": ["yes"], "2": ["yes"]}))
    (found,) = quality(scores, {"1": "qa", "2": "qa"})
    assert (found.metric, found.value, found.count) == ("containment", 75.0, 1)  # means of 50 and 100
    assert found.run_sd == pytest.approx(35.355, abs=0.001)


def test_quality_of_translations_is_the_corpus() -> None:
    answers = [answer("translation", text, str(number)) for number, text in enumerate(SAID)]
    scores = list(score_answers(answers, {str(number): [text] for number, text in enumerate(RIGHT)}))
    (found,) = quality(scores, dict.fromkeys("01", "translation"))
    assert found.metric == "bleu" and found.count == 2 and found.run_sd is None
    assert found.value == pytest.approx(sacrebleu.corpus_bleu(SAID, [RIGHT]).score)
