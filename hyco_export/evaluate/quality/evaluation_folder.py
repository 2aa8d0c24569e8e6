"""The files of an evaluation's folder that scores and contrasts are made of.

`answers.jsonl` is read; `scores.jsonl` and `summary.json` are read and written anew, each in one step, so that a kill
leaves the old file or the new one.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec

from hyco_export.core.files import pretty_json
from hyco_export.errors import ArtifactError

ANSWERS, SCORES, SUMMARY, PLAN = "answers.jsonl", "scores.jsonl", "summary.json", "plan.json"
NO_EVALUATION = "give the folder of a finished or stopped evaluation"

Row = TypeVar("Row", bound=msgspec.Struct)


class AnswerKey(NamedTuple):
    """Which answer: `turn` counts from 1, `generation` from 0."""

    system: str
    question: str
    turn: int
    generation: int


class Answer(msgspec.Struct, frozen=True):
    """A row of `answers.jsonl`, as far as scores and contrasts need it.

    `prompt` is the text of the user's turn, `server_ms` the server's time for this turn in ms, `failure` why there is
    no text.
    """

    system: str
    question: str
    task: str
    turn: int
    generation: int
    prompt: str = ""
    text: str | None = None
    tokens: int = 0
    server_ms: float | None = None
    failure: str | None = None

    @property
    def key(self) -> AnswerKey:
        return AnswerKey(self.system, self.question, self.turn, self.generation)


class Score(msgspec.Struct, frozen=True):
    """A row of `scores.jsonl`; `reason` says why there is no value."""

    system: str
    question: str
    turn: int
    generation: int
    metric: str
    value: float | None
    reason: str = ""

    @property
    def key(self) -> AnswerKey:
        return AnswerKey(self.system, self.question, self.turn, self.generation)


def read_answers(folder: Path) -> list[Answer]:
    """Every answer once: of a failed one that was tried again the newest row.

    Raises:
        ArtifactError: the folder holds no answers, or the file is damaged.
    """
    path = folder / ANSWERS
    if not path.is_file():
        raise ArtifactError(f"{folder} holds no evaluation (no {ANSWERS})", NO_EVALUATION)
    rows = {answer.key: answer for answer in read_rows(path, Answer)}
    if not rows:
        raise ArtifactError(f"{path} holds no answer yet", NO_EVALUATION)
    return list(rows.values())


def read_scores(folder: Path) -> list[Score]:
    """All scores; none where nothing was scored.

    Raises:
        ArtifactError: the file is damaged.
    """
    path = folder / SCORES
    return list(read_rows(path, Score)) if path.exists() else []


def replace_scores(folder: Path, metrics: Iterable[str], scores: Iterable[Score]) -> None:
    """Put `scores` in the place of all rows of these metrics; rows of other metrics stay as they are."""
    replaced = frozenset(metrics)
    kept = [score for score in read_scores(folder) if score.metric not in replaced]
    encode = msgspec.json.Encoder().encode
    _replace(folder / SCORES, b"".join(encode(score) + b"\n" for score in (*kept, *scores)))


def read_summary(folder: Path) -> dict[str, Any]:
    """The summary's parts by name; none where there is no summary.

    Raises:
        ArtifactError: the file is damaged.
    """
    path = folder / SUMMARY
    return _read_object(path) if path.exists() else {}


def update_summary(folder: Path, parts: Mapping[str, Any]) -> None:
    """Put these parts into the summary; its other parts stay as they are."""
    _replace(folder / SUMMARY, pretty_json({**read_summary(folder), **parts}))


def systems_of(folder: Path, answers: Sequence[Answer]) -> list[str]:
    """The systems with answers, the baseline first: in the order of `plan.json`, where it names them.

    Raises:
        ArtifactError: `plan.json` is damaged.
    """
    found = list(dict.fromkeys(answer.system for answer in answers))
    path = folder / PLAN
    named = _read_object(path).get("systems") if path.exists() else None
    order = [name for name in named if name in found] if isinstance(named, list) else []
    return order + [name for name in found if name not in order]


def read_rows(path: Path, kind: type[Row]) -> Iterable[Row]:
    """The rows of a JSONL file, in their order.

    Raises:
        ArtifactError: a line is no such row.
    """
    decoder = msgspec.json.Decoder(kind)
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                yield decoder.decode(line)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise ArtifactError(f"{path}, line {number}, cannot be read: {error}", NO_EVALUATION) from error


def _read_object(path: Path) -> dict[str, Any]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ArtifactError(f"{path} cannot be read: {error}", NO_EVALUATION) from error


def _replace(path: Path, content: bytes) -> None:
    draft = path.with_name(f"{path.name}.draft")
    draft.write_bytes(content)
    draft.replace(path)
