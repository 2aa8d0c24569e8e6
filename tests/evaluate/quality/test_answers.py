"""Rows of answers: what is counted into them, and what a kill leaves of their file."""

from pathlib import Path

import msgspec
import numpy as np

from hyco_export.core.data.conversations import Message
from hyco_export.core.keepset import KeepSet
from hyco_export.evaluate.quality.answers import AnswerFile, answer_of, coverage, failed_answer
from hyco_export.evaluate.quality.evaluation_folder import Answer, Place, read_answers
from hyco_export.evaluate.quality.prompt_fitting import FittedPrompt
from hyco_export.evaluate.quality.prompt_sets import Question
from hyco_export.protocol import wire
from tests.evaluate.synthetic_traces import generation, local_trace, prime_trace, round_trace

QUESTION = Question("7", "mt-bench", "writing", ((Message("user", "One?"),), (Message("user", "Two?"),)))
PLACE = Place("hyco", "7", 2, 0)
EVIDENCE = wire.Evidence([10], [-1], [10, 99], [0.5], [0.4], [1.0, 1.0])


def test_a_row_counts_what_its_trace_says() -> None:
    rounds = (
        round_trace((0, 5), drawn=(True, False), tokens=(10, 30, 99)),
        round_trace((), number=2, evidence=EVIDENCE),
    )
    row = answer_of(PLACE, QUESTION, FittedPrompt((1, 2), 5), generation(*rounds), "words", KeepSet(np.arange(60), 128))
    assert (row.prompt, row.text, row.task, row.category, row.turn) == ("Two?", "words", "mt-bench", "writing", 2)
    assert (row.tokens, row.rounds, row.prompt_tokens, row.cut_tokens) == (5, 2, 2, 3)
    assert row.server_ms == 7.0 + 3.0 + 3.0 and row.draft_ms == 8.0
    assert (row.wall_ms, row.first_token_ms, row.finished) == (100.0, 20.0, "length")
    assert row.by_source == {"chain": 1, "runner-up": 0, "slm": 1, "bonus": 2}
    assert row.by_rule == {"draw": 3, "threshold only": 1}
    assert row.keepset_misses == 2  # token 99 of 60 kept ones
    assert row.bytes_up == 40 + 2 * 60
    assert row.bytes_down == 9000 + 2 * 400 - (len(wire.encode(EVIDENCE)) - 1)  # as if p~ had not been asked for


def test_disturbed_calls_are_in_no_time_and_kept_tokens_are_unverified() -> None:
    primes = (prime_trace(), prime_trace(3, lost_ms=20.0))
    trace = generation(round_trace((0,), lost_ms=30.0), primes=primes, locals=(local_trace((5, 6)),))
    row = answer_of(PLACE, QUESTION, FittedPrompt((1,), 1), trace, "", KeepSet(np.arange(128), 128))
    assert (row.server_ms, row.wall_ms, row.draft_ms) == (7.0, 50.0, 2.0)
    assert (row.unverified, row.keepset_misses) == (2, 0)


def rows_of(places: list[Place]) -> list[Answer]:
    return [msgspec.structs.replace(failed_answer(place, QUESTION, ""), failure=None, text="x") for place in places]


def test_the_file_keeps_the_plans_order_and_forgets_what_is_half_written(tmp_path: Path) -> None:
    places = [Place("hyco", "7", turn, generation) for generation in (0, 1) for turn in (1, 2)]
    file = AnswerFile(tmp_path, places)
    assert file.failures() == {}
    first, second, third, fourth = rows_of(places)
    file.replace([second, first])
    file.add(failed_answer(places[3], QUESTION, "no room"))
    with file.path.open("ab") as stream:
        stream.write(b'{"system": "hy')
    again = AnswerFile(tmp_path, places)
    assert again.failures() == {places[3]: failed_answer(places[3], QUESTION, "no room")}
    again.replace([fourth, third, second, first])
    assert list(read_answers(tmp_path)) == [first, second, third, fourth]
    shorter = AnswerFile(tmp_path, places[:1])
    file.add(failed_answer(places[3], QUESTION, "no room"))
    assert shorter.failures() == {}  # a row of no place of this plan


def test_coverage_counts_answers_and_not_failures() -> None:
    places = [Place(system, "7", turn, 0) for system in ("a", "b") for turn in (1, 2)]
    rows = [*rows_of(places[:3]), failed_answer(places[3], QUESTION, "no room")]
    assert coverage(rows, places) == {"a": (2, 2), "b": (1, 2)}
