"""`judgements.jsonl`: every reply of a judge, on the disk at once, so that no logged reply is asked for again."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from hyco_export.evaluate.quality.evaluation_folder import JUDGEMENTS, read_rows

TOKENS_A_PRICE = 1_000_000  # prices are given for a million tokens


class JudgementKey(NamedTuple):
    """Which request: the answer, what was asked about it, of whom, and a digest of the messages."""

    system: str
    question: str
    turn: int
    generation: int
    metric: str
    model: str
    asked: str


class Judgement(msgspec.Struct, frozen=True):
    """One reply. `value` is None where there is no score, `reason` then says why; `request` holds the model and the
    sampling fields that were sent; `attempts` counts those that the last call took."""

    system: str
    question: str
    turn: int
    generation: int
    metric: str
    model: str
    asked: str
    value: float | None
    reason: str
    reply: str
    finish: str
    tokens_in: int
    tokens_out: int
    attempts: int
    request: Mapping[str, Any]

    @property
    def key(self) -> JudgementKey:
        return JudgementKey(self.system, self.question, self.turn, self.generation, self.metric, self.model, self.asked)


class JudgementLog:
    """The log of one folder, opened to be read and gone on with.

    Raises:
        ArtifactError: a line is damaged; half of a last line, which a kill left, is dropped.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / JUDGEMENTS
        _drop_half_a_line(self.path)
        rows = read_rows(self.path, Judgement) if self.path.exists() else ()
        self._rows = {row.key: row for row in rows}

    def find(self, key: JudgementKey) -> Judgement | None:
        """The newest reply to this request."""
        return self._rows.get(key)

    def has_reply_of(self, model: str) -> bool:
        """Has this model ever given a score here."""
        return any(row.model == model and row.value is not None for row in self._rows.values())

    def add(self, row: Judgement) -> None:
        """Keep a reply, on the disk when this returns."""
        with self.path.open("ab") as stream:
            stream.write(msgspec.json.encode(row) + b"\n")
            stream.flush()
            os.fsync(stream.fileno())
        self._rows[row.key] = row


class Prices(NamedTuple):
    """Money for a million tokens, in whatever currency they are given."""

    tokens_in: float | None
    tokens_out: float | None

    def of(self, tokens_in: int, tokens_out: int) -> float | None:
        """What so many tokens cost; None where no price was given."""
        if self.tokens_in is None and self.tokens_out is None:
            return None
        return ((self.tokens_in or 0.0) * tokens_in + (self.tokens_out or 0.0) * tokens_out) / TOKENS_A_PRICE


def _drop_half_a_line(path: Path) -> None:
    if not path.exists():
        return
    content = path.read_bytes()
    whole = content.rfind(b"\n") + 1
    if whole < len(content):
        os.truncate(path, whole)
