"""An evaluation's folder: its rows and its summary as types, and how they are read and replaced.

`answers.jsonl` is written by `answers.py`, `judgements.jsonl` by `judge/log.py`. `scores.jsonl` and `summary.json` are
written here, each in one step, so that a kill leaves the old file or the new one.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec

from hyco_export.core.files import pretty_json
from hyco_export.errors import ArtifactError

ANSWERS, SCORES, SUMMARY, PLAN = "answers.jsonl", "scores.jsonl", "summary.json", "plan.json"
JUDGEMENTS = "judgements.jsonl"
NOT_TRACES = (ANSWERS, SCORES, JUDGEMENTS)  # beside SYSTEM.jsonl
ALL_TASKS = "all"
SERVER_TIME = "g"  # the measure of a contrast that is no metric of answers
TURN_MARK = "/turn"  # between a question's id and the number of a later turn
NO_EVALUATION = "give the folder of a finished or stopped evaluation"

Value = TypeVar("Value")


def turn_id(question: str, turn: int) -> str:
    """What traces call the prompt of a question's turn, from 1."""
    return question if turn == 1 else f"{question}{TURN_MARK}{turn}"


class Place(NamedTuple):
    """Which answer: `turn` counts from 1, `generation` from 0."""

    system: str
    question: str
    turn: int
    generation: int

    @property
    def prompt_id(self) -> str:
        """What its trace calls the prompt."""
        return turn_id(self.question, self.turn)


class Answer(msgspec.Struct, frozen=True):
    """A row of `answers.jsonl`. Times are of undisturbed calls; `bytes_down` is without the evidence that only traces
    need. `failure` says why there is no text."""

    system: str
    question: str
    task: str
    category: str = ""
    turn: int = 1
    generation: int = 0
    prompt: str = ""  # the user's words of this turn
    text: str = ""
    ids: tuple[int, ...] = ()
    finished: str = ""  # "stop", "length"; "" of a failure
    tokens: int = 0
    rounds: int = 0
    prompt_tokens: int = 0
    cut_tokens: int = 0  # ids that --truncate left out of the prompt
    server_ms: float = 0.0
    draft_ms: float = 0.0
    wall_ms: float = 0.0
    first_token_ms: float = 0.0
    bytes_up: int = 0  # bodies, PRIME and all rounds
    bytes_down: int = 0
    by_source: dict[str, int] = {}
    by_rule: dict[str, int] = {}
    unverified: int = 0
    keepset_misses: int = 0  # bonus tokens outside the keep set
    failure: str | None = None

    @property
    def place(self) -> Place:
        return Place(self.system, self.question, self.turn, self.generation)


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
    def place(self) -> Place:
        return Place(self.system, self.question, self.turn, self.generation)


class Quality(msgspec.Struct, frozen=True):
    """A metric of a system over a task or ALL_TASKS: the mean of its generations' values, and their sample SD; None for
    one generation. `count`: questions that have a value in every generation."""

    system: str
    task: str
    metric: str
    value: float
    count: int
    run_sd: float | None


class Contrast(msgspec.Struct, frozen=True):
    """A system against a baseline, with the ends of the paired 95 % interval.

    `measure` is `g`, whose contrast is a relative change, or a metric, whose contrast is a difference; `pairs` the
    complete questions; `exploratory` marks contrasts of one task, which are many and not adjusted for it; `run_sd` is
    the sample SD of the contrast over the system's generations, None for one.
    """

    baseline: str
    system: str
    measure: str
    task: str
    estimate: float
    low: float
    high: float
    pairs: int
    exploratory: bool
    run_sd: float | None = None


class NoSaving(msgspec.Struct, frozen=True):
    """Questions whose g is not below the baseline's, in one generation of a system."""

    generation: int
    count: int
    pairs: int
    share: float
    questions: tuple[str, ...]


class Screened(msgspec.Struct, frozen=True):
    """A question whose judge score is far from the baseline's (`contrasts.SCREEN_POINTS`): one to read."""

    baseline: str
    system: str
    question: str
    task: str
    difference: float
    scores: tuple[float, ...]  # by generation
    baseline_scores: tuple[float, ...]


class Summary(msgspec.Struct, frozen=True):
    """`summary.json`, whose parts come one by one; `systems` are `SystemMetrics` as JSON has them."""

    coverage: dict[str, tuple[int, int]] = {}  # done, planned
    systems: tuple[dict[str, Any], ...] = ()
    quality: tuple[Quality, ...] = ()
    contrasts: tuple[Contrast, ...] = ()
    questions_without_saving: dict[str, tuple[NoSaving, ...]] = {}  # by system, a row a generation
    screen: tuple[Screened, ...] = ()


def is_evaluation(folder: Path) -> bool:
    """Did `evaluate` write here."""
    return (folder / ANSWERS).is_file() or (folder / SUMMARY).is_file()


def read_answers(folder: Path) -> tuple[Answer, ...]:
    """Every answer once: of a failed one that was tried again the newest row.

    Raises:
        ArtifactError: the folder holds no answers, or the file is damaged.
    """
    path = folder / ANSWERS
    if not path.is_file():
        raise ArtifactError(f"{folder} holds no evaluation (no {ANSWERS})", NO_EVALUATION)
    rows = answers_so_far(folder)
    if not rows:
        raise ArtifactError(f"{path} holds no answer yet", NO_EVALUATION)
    return rows


def answers_so_far(folder: Path) -> tuple[Answer, ...]:
    """The same, also of a folder without an answer.

    Raises:
        ArtifactError: the file is damaged.
    """
    path = folder / ANSWERS
    rows = read_rows(path, Answer) if path.is_file() else ()
    return tuple({answer.place: answer for answer in rows}.values())


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


def read_summary(folder: Path) -> Summary:
    """The summary; empty where there is none.

    Raises:
        ArtifactError: the file is damaged.
    """
    path = folder / SUMMARY
    return read_json(path, Summary) if path.exists() else Summary()


def update_summary(folder: Path, parts: Mapping[str, Any]) -> None:
    """Put these parts into the summary; its other parts stay as they are."""
    path = folder / SUMMARY
    there = read_json(path, dict[str, Any]) if path.exists() else {}
    _replace(path, pretty_json({**there, **parts}))


def systems_of(folder: Path, answers: Sequence[Answer]) -> list[str]:
    """The systems with answers, the baseline first: in the order of `plan.json`, where it names them.

    Raises:
        ArtifactError: `plan.json` is damaged.
    """
    found = list(dict.fromkeys(answer.system for answer in answers))
    path = folder / PLAN
    named = read_json(path, dict[str, Any]).get("systems") if path.exists() else None
    order = [name for name in named if name in found] if isinstance(named, list) else []
    return order + [name for name in found if name not in order]


def read_rows(path: Path, kind: type[Value]) -> Iterable[Value]:
    """The rows of a JSONL file, in their order; a last line that a kill cut short is passed over.

    Raises:
        ArtifactError: a line is no such row.
    """
    decoder = msgspec.json.Decoder(kind)
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip() or not line.endswith(b"\n"):
                continue
            try:
                yield decoder.decode(line)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise ArtifactError(f"{path}, line {number}, cannot be read: {error}", NO_EVALUATION) from error


def read_json(path: Path, kind: type[Value], hint: str = NO_EVALUATION) -> Value:
    """One JSON file; `hint` is the next step where it is damaged.

    Raises:
        ArtifactError: it cannot be read as `kind`.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ArtifactError(f"{path} cannot be read: {error}", hint) from error


def _replace(path: Path, content: bytes) -> None:
    draft = path.with_name(f"{path.name}.draft")
    draft.write_bytes(content)
    draft.replace(path)
