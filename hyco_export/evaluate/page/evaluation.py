"""What an evaluation's folder holds beside its traces: answers, scores, and the summary over them.

Only what a page shows is read; fields that a newer release adds are passed over.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from hyco_export.errors import ArtifactError

SUMMARY_FILE, ANSWERS_FILE, SCORES_FILE = "summary.json", "answers.jsonl", "scores.jsonl"
ALL_TASKS = "all"
SERVER_TIME = "g"  # the measure of a contrast that is no metric of answers


class Answer(msgspec.Struct, frozen=True):
    """One generation of a question's turn; `failure` says why there is none."""

    system: str
    question: str
    task: str = ""
    turn: int = 1
    generation: int = 0
    prompt: str = ""  # text of the user's turn
    ids: tuple[int, ...] = ()
    failure: str | None = None

    @property
    def prompt_id(self) -> str:
        """What its trace calls the prompt."""
        return self.question if self.turn == 1 else f"{self.question}/turn{self.turn}"


class Score(msgspec.Struct, frozen=True):
    """One metric of one answer; `reason` says why `value` is missing."""

    system: str
    question: str
    metric: str
    turn: int = 1
    generation: int = 0
    value: float | None = None
    reason: str = ""


class Quality(msgspec.Struct, frozen=True):
    """A metric of a system's answers, over a task or all of them. `run_sd`: standard deviation between generations."""

    system: str
    task: str
    metric: str
    value: float | None = None
    count: int = 0
    run_sd: float | None = None


class Contrast(msgspec.Struct, frozen=True):
    """A paired difference between two systems, with its 95 % interval, in `unit`; of `g` it is a change in percent."""

    baseline: str
    system: str
    measure: str
    task: str = ALL_TASKS
    estimate: float | None = None
    low: float | None = None
    high: float | None = None
    pairs: int = 0
    exploratory: bool = False
    unit: str = ""


class Summary(msgspec.Struct, frozen=True):
    """`summary.json`; `systems` are `SystemMetrics` as JSON has them."""

    coverage: dict[str, tuple[int, int]] = {}  # done, planned
    systems: tuple[dict[str, Any], ...] = ()
    quality: tuple[Quality, ...] = ()
    contrasts: tuple[Contrast, ...] = ()
    questions_without_saving: dict[str, tuple[dict[str, Any], ...]] = {}  # by system, a row a generation
    screen: tuple[dict[str, Any], ...] = ()


class Evaluation(msgspec.Struct, frozen=True):
    """Everything of one folder that a page shows."""

    answers: tuple[Answer, ...]
    scores: tuple[Score, ...]
    summary: Summary

    @property
    def failures(self) -> tuple[Answer, ...]:
        """Generations that came to nothing."""
        return tuple(answer for answer in self.answers if answer.failure)


Value = TypeVar("Value")


def is_evaluation(folder: Path) -> bool:
    """Did `evaluate` write here."""
    return (folder / ANSWERS_FILE).is_file() or (folder / SUMMARY_FILE).is_file()


def read_evaluation(folder: Path) -> Evaluation:
    """The folder's answers, scores and summary; what is not there yet is empty.

    Raises:
        ArtifactError: a file is damaged.
    """
    summary = folder / SUMMARY_FILE
    with_summary = read_json(summary, Summary) if summary.is_file() else Summary()
    tried = _rows(folder / ANSWERS_FILE, Answer)  # of a failed answer that was tried again the newest row counts
    answers = {(one.system, one.question, one.turn, one.generation): one for one in tried}
    return Evaluation(tuple(answers.values()), tuple(_rows(folder / SCORES_FILE, Score)), with_summary)


def read_json(path: Path, kind: type[Value]) -> Value:
    """One JSON file.

    Raises:
        ArtifactError: it cannot be read as `kind`.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, msgspec.DecodeError) as error:
        raise ArtifactError(f"{path} cannot be read: {error}", "make it again, or leave the folder out") from error


def _rows(path: Path, kind: type[Value]) -> Iterator[Value]:
    """The rows of a JSON lines file; a last line that a kill cut short is passed over."""
    if not path.is_file():
        return
    lines = path.read_bytes().splitlines(keepends=True)
    for number, line in enumerate(lines, 1):
        if not line.strip() or not line.endswith(b"\n"):
            continue
        try:
            yield msgspec.json.decode(line, type=kind)
        except msgspec.DecodeError as error:
            hint = "make it again, or leave the folder out"
            raise ArtifactError(f"{path}, line {number}, cannot be read: {error}", hint) from error
