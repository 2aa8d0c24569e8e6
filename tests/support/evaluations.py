"""Small folders of an evaluation, with answers whose figures can be worked out by hand, and references in HELMET's
layout with prompts of our own."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from hyco_export.evaluate.quality.evaluation_folder import ANSWERS, PLAN, SCORES, Answer, Score

BASELINE, SYSTEM, OTHER = "cloud-mtp", "hyco", "specedge-eps"
HELMET_PROMPTS = '''"""Prompts as HELMET's script holds them."""
import sys  # it must not be run
raise SystemExit("this script was run")
fluency_prompt = "of another task: {text}"
fluency_prompt_book = """Fluent? {text} Reply like {{"fluency": 1}}."""
recall_prompt_book = """Points:
{keypoints}
Summary: {summary} Reply like {{"recall": 2}}."""
precision_prompt_book = """Expert: {expert_summary}
Summary: {summary} Reply like {{"precision": 7, "sentence_count": 20}}."""
'''


def answer(
    system: str, question: str, task: str = "translation", turn: int = 1, generation: int = 0, **more: Any
) -> Answer:
    """One answer of 10 tokens in 50 ms, unless `more` says otherwise."""
    text = f"answer of {system} to {question}, turn {turn}, generation {generation}"
    values = {"prompt": f"question {question}, turn {turn}", "text": text, "tokens": 10, "server_ms": 50.0, **more}
    return Answer(system, question, task, turn=turn, generation=generation, **values)


def score(scored: Answer, value: float | None, metric: str = "judge", reason: str = "") -> Score:
    """A score of an answer."""
    return Score(*scored.place, metric, value, reason)


def write_evaluation(
    folder: Path, answers: Sequence[Answer], scores: Iterable[Score] = (), systems: Sequence[str] = ()
) -> Path:
    """The folder as `evaluate` leaves it, as far as scores and contrasts look at it."""
    folder.mkdir(parents=True, exist_ok=True)
    _write_rows(folder / ANSWERS, answers)
    _write_rows(folder / SCORES, scores)
    order = list(systems) or list(dict.fromkeys(row.system for row in answers))
    (folder / PLAN).write_bytes(msgspec.json.encode({"systems": order}))
    return folder


def small_evaluation(folder: Path) -> Path:
    """Two systems; a translation, an MT-bench question of two turns, and a summary of book 0 that failed for one."""
    answers = []
    for system in (BASELINE, SYSTEM):
        answers += [answer(system, "161"), answer(system, "81", "mt-bench"), answer(system, "81", "mt-bench", turn=2)]
    answers.append(answer(BASELINE, "0", "infinitebench-sum"))
    answers.append(
        answer(SYSTEM, "0", "infinitebench-sum", text="", tokens=0, server_ms=0.0, failure="server went away")
    )
    return write_evaluation(folder, answers)


def write_helmet(folder: Path) -> tuple[Path, Path]:
    """Prompts and references of book 0, which has three key points."""
    folder.mkdir(parents=True, exist_ok=True)
    prompts, references = folder / "eval_gpt4_summ.py", folder / "keypoints.jsonl"
    prompts.write_text(HELMET_PROMPTS)
    row = {"id": 0, "keypoints": ["one", "two", "three"], "answer": ["the expert's summary"], "context": "long"}
    _write_rows(references, [row])
    return prompts, references


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """The rows of a file."""
    return [msgspec.json.decode(line) for line in path.read_bytes().splitlines()]


def _write_rows(path: Path, rows: Iterable[Mapping[str, Any] | msgspec.Struct]) -> None:
    path.write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in rows))
