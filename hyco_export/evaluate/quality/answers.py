"""Answers as rows of `answers.jsonl`: one for every system, question, turn and generation.

A generation that failed has a row that says why, and no text; nothing takes its place in any figure.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec
import numpy as np

from hyco_export.core.keepset import MISSING, KeepSet
from hyco_export.evaluate.metrics import evidence_bytes, taken, timed_steps, tokens_by_rule, tokens_by_source
from hyco_export.evaluate.quality.evaluation_folder import ANSWERS, Answer, Place, read_rows
from hyco_export.evaluate.quality.prompt_fitting import FittedPrompt
from hyco_export.evaluate.quality.prompt_sets import Question
from hyco_export.protocol.trace import GenerationTrace


def failed_answer(place: Place, question: Question, failure: str) -> Answer:
    """The row of a generation that came to nothing."""
    prompt = question.asked(place.turn)
    return Answer(**place._asdict(), task=question.task, category=question.category, prompt=prompt, failure=failure)


def answer_of(
    place: Place, question: Question, prompt: FittedPrompt, trace: GenerationTrace, text: str, keepset: KeepSet
) -> Answer:
    """The row of a finished generation."""
    timed = timed_steps([trace])
    traffic = [call.traffic for call in trace.primes] + [call.traffic for call in trace.rounds]
    bonus = np.array([token for one in trace.rounds for token in one.tokens[len(taken(one)) :]], dtype=np.int64)
    local_ms = sum(step.draft_ms for step in trace.locals)
    return Answer(
        **place._asdict(),
        task=question.task,
        category=question.category,
        prompt=question.asked(place.turn),
        text=text,
        ids=trace.tokens,
        finished=trace.finished,
        tokens=len(trace.tokens),
        rounds=len(trace.rounds),
        prompt_tokens=len(prompt.ids),
        cut_tokens=prompt.cut,
        server_ms=sum(call.server_ms for call in timed.primes) + sum(call.server_ms for call in timed.rounds),
        draft_ms=sum(one.draft_ms + one.ahead_ms for one in timed.rounds) + local_ms,
        wall_ms=timed.ms,
        first_token_ms=trace.first_token_ms,
        bytes_up=sum(one.payload_up_bytes for one in traffic),
        bytes_down=sum(one.payload_down_bytes for one in traffic) - sum(map(evidence_bytes, trace.rounds)),
        by_source=tokens_by_source(trace.rounds),
        by_rule=tokens_by_rule(trace.rounds),
        unverified=sum(len(step.tokens) for step in trace.locals),
        keepset_misses=int((keepset.rows(bonus) == MISSING).sum()),
    )


class AnswerFile:
    """`answers.jsonl` of a folder, in the order of `places`; rows that belong to no place are dropped.

    A row is appended when its generation is finished. When the file is opened again, what a kill left half written is
    dropped: rows of finished generations are made anew from their traces, those of failures are read from the file.
    """

    def __init__(self, folder: Path, places: Sequence[Place]) -> None:
        self.path = folder / ANSWERS
        self._order = {place: number for number, place in enumerate(places)}
        self.rows: dict[Place, Answer] = {}

    def failures(self) -> dict[Place, Answer]:
        """Failed rows of the file as it lies there."""
        if not self.path.exists():
            return {}
        found = (row for row in read_rows(self.path, Answer) if row.failure is not None)
        return {row.place: row for row in found if row.place in self._order}

    def replace(self, rows: Iterable[Answer]) -> None:
        """Write these rows and no others."""
        self.rows = {row.place: row for row in rows}
        draft = self.path.with_name(f"{ANSWERS}.draft")
        ordered = sorted(self.rows.values(), key=lambda row: self._order[row.place])
        draft.write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in ordered))
        draft.replace(self.path)

    def add(self, row: Answer) -> None:
        """Keep one more."""
        self.rows[row.place] = row
        with self.path.open("ab") as stream:
            stream.write(msgspec.json.encode(row) + b"\n")


def coverage(rows: Iterable[Answer], places: Iterable[Place]) -> dict[str, tuple[int, int]]:
    """By system: how many generations have an answer, and how many were planned."""
    done = {row.place for row in rows if row.failure is None}
    counts: dict[str, tuple[int, int]] = {}
    for place in places:
        finished, planned = counts.get(place.system, (0, 0))
        counts[place.system] = (finished + (place in done), planned + 1)
    return counts
