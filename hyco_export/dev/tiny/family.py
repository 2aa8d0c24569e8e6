"""Trains the whole embedded family, from the text on this machine to three checkpoints and their model card.

Independent trainings run at the same time, each in a process of its own with one thread.
"""

import copy
import json
import multiprocessing
import platform
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from hyco_export.dev.tiny.card import card_text, measure_family
from hyco_export.dev.tiny.chain import sampled_rows
from hyco_export.dev.tiny.configs import train_tokenizer
from hyco_export.dev.tiny.corpus import (
    Dialogue,
    Message,
    held_out_corpus,
    invented_questions,
    known_questions,
    training_corpus,
)
from hyco_export.dev.tiny.packing import cache_scales, save_packed
from hyco_export.dev.tiny.training import Row, dialogue_rows, prompt_ids
from hyco_export.dev.tiny.trainings import mean_loss, train_head, train_slm, train_verifier
from hyco_export.errors import HycoError
from hyco_export.models.families.gemma4 import LanguageModel

# ---- independent trainings at the same time

Report = Callable[[float], None]
"""Called with the share that is done, 0 to 1."""

Job = tuple[Callable[..., Any], tuple[Any, ...]]
"""A module-level function and its arguments; it is called with one more, a `Report`."""

REPORT_EVERY_S = 1.0


def run_side_by_side(
    jobs: Mapping[str, Job], on_progress: Callable[[str, float], None]
) -> tuple[dict[str, Any], float]:
    """Results by job name, and the CPU-seconds of all jobs together."""
    context = multiprocessing.get_context("spawn")
    names: dict[Connection, str] = {}
    processes = []
    for name, (function, arguments) in jobs.items():
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_work, args=(sender, function, arguments), name=name)
        process.start()
        sender.close()
        names[receiver] = name
        processes.append(process)
    try:
        results, cpu_seconds = _collect(names, on_progress)
        return {name: results[name] for name in jobs}, cpu_seconds
    finally:
        for process in processes:
            process.terminate()
            process.join()


def _collect(names: dict[Connection, str], on_progress: Callable[[str, float], None]) -> tuple[dict[str, Any], float]:
    results: dict[str, Any] = {}
    cpu_seconds = 0.0
    while len(results) < len(names):
        for connection in wait([connection for connection, name in names.items() if name not in results]):
            name = names[connection]  # type: ignore[index]
            kind, value = _receive(connection, name)
            if kind == "progress":
                on_progress(name, value)
            elif kind == "result":
                results[name], seconds = value
                cpu_seconds += seconds
            else:
                raise HycoError(f"the training of the {name} failed: {value}", "see the traceback in the message")
    return results, cpu_seconds


def _receive(connection: Any, name: str) -> tuple[str, Any]:
    try:
        return connection.recv()
    except EOFError:
        raise HycoError(f"the process that trains the {name} ended early", "look for a lack of memory") from None


def _work(sender: Connection, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    """Body of a spawned process: one thread, progress at most once a second, then the result or the traceback."""
    torch.set_num_threads(1)
    last_report_s = 0.0

    def report(share: float) -> None:
        nonlocal last_report_s
        if share >= 1.0 or time.monotonic() - last_report_s > REPORT_EVERY_S:
            last_report_s = time.monotonic()
            sender.send(("progress", share))

    try:
        result = function(*arguments, report)
    except BaseException:
        sender.send(("error", traceback.format_exc()))
        raise
    sender.send(("result", (result, time.process_time())))


Progress = Callable[[str, float], None]
"""Called with the name of the part and the share of it that is done."""

DEFAULT_SEED = 0
"""The seed of the family that ships with the package."""

WEIGHTS_FILE = "model.safetensors"

CONVERSATION_STRIDE = 6
"""Every sixth dialogue of the corpus ships with the family: about 900."""

SECOND_SHARPENING = 14 / 9
"""Factor on the final norm when all are trained: with the 2.25 before (`trainings.SHARPENING`) it is 3.5."""

CALIBRATION_ROWS = 64
"""Sampled answers from which the SLM's cache scales are read."""


@dataclass(frozen=True)
class Budget:
    """Steps and questions of each training. A changed number makes another family."""

    verifier_steps: int
    known_questions: int
    invented_questions: int
    head_steps: int
    slm_steps: int
    measured_prompts: int


FULL = Budget(
    verifier_steps=1800,
    known_questions=2000,
    invented_questions=4000,
    head_steps=1300,
    slm_steps=1600,
    measured_prompts=120,
)
QUICK = Budget(verifier_steps=8, known_questions=6, invented_questions=6, head_steps=2, slm_steps=6, measured_prompts=4)
"""For tests: the same shapes and formats, hardly trained."""


def train_family(out_dir: Path, *, seed: int, quick: bool, on_progress: Progress) -> dict[str, Any]:
    """Train verifier, head and SLM into `out_dir` and return what the model card says, plus the CPU-minutes.

    The files depend on the Python version and the seed alone. Head and SLM train at the same time, each in a process of
    its own with one thread.

    Raises:
        HycoError: the folder is not empty, or a training process failed.
    """
    if out_dir.exists() and any(out_dir.iterdir()):
        raise HycoError(f"{out_dir} is not empty", "name a new folder")
    budget = QUICK if quick else FULL
    started_s = time.process_time()
    with one_thread():
        on_progress("text", 0.0)
        corpus = training_corpus()
        tokenizer = train_tokenizer(message["content"] for dialogue in corpus for message in dialogue.messages)
        write_conversations(corpus[::CONVERSATION_STRIDE], out_dir)
        on_progress("text", 1.0)

        losses = verifier_part(out_dir, corpus, tokenizer, budget, seed, on_progress)
        questions = known_questions(budget.known_questions) + invented_questions(budget.invented_questions)
        rows = sampled_part(out_dir, questions, tokenizer, seed, lambda share: on_progress("samples", share))
        jobs: dict[str, Job] = {
            "head": (head_part, (out_dir, rows, budget.head_steps, seed)),
            "slm": (slm_part, (out_dir, tokenizer, rows, budget.slm_steps, seed)),
        }
        part_losses, children_s = run_side_by_side(jobs, on_progress)
        sharpen_again(out_dir)
        measured = measured_part(out_dir, tokenizer, budget, seed, on_progress)
    facts = {"python": platform.python_version(), "seed": seed, "losses": losses | part_losses} | measured
    (out_dir / "MODEL_CARD.md").write_text(card_text(facts, out_dir), encoding="utf-8")
    return facts | {"cpu_minutes": (time.process_time() - started_s + children_s) / 60}


def verifier_part(
    out_dir: Path,
    corpus: Sequence[Dialogue],
    tokenizer: PreTrainedTokenizerFast,
    budget: Budget,
    seed: int,
    on_progress: Progress,
) -> dict[str, float]:
    """Train and store the verifier; returns its losses by name."""
    rows = dialogue_rows(corpus, tokenizer)
    verifier, loss = train_verifier(
        rows, steps=budget.verifier_steps, seed=seed, report=lambda share: on_progress("verifier", share)
    )
    store(verifier, out_dir / "verifier")
    tokenizer.save_pretrained(out_dir / "verifier")
    held_out = dialogue_rows(held_out_corpus()[: budget.measured_prompts], tokenizer)
    return {"verifier": loss, "verifier, sharpened, held out": mean_loss(verifier, held_out)}


def sampled_part(
    out_dir: Path,
    questions: Sequence[Message],
    tokenizer: PreTrainedTokenizerFast,
    seed: int,
    report: Callable[[float], None],
) -> list[Row]:
    """The verifier's own answers to the questions."""
    prompts = [prompt_ids([question], tokenizer) for question in questions]
    return sampled_rows(load(out_dir / "verifier"), prompts, seed=seed, report=report)


def head_part(out_dir: Path, rows: Sequence[Row], steps: int, seed: int, report: Callable[[float], None]) -> float:
    """Train and store the head; returns its loss."""
    head, loss = train_head(load(out_dir / "verifier"), rows, steps=steps, seed=seed, report=report)
    store(head, out_dir / "head")
    return loss


def sharpen_again(out_dir: Path) -> None:
    """Scale the stored verifier's final norm once more; the head's projections undo and redo the factor.

    Drafters are trained on the less certain verifier, whose answers vary more. The more certain one is served: its
    acceptance differs less from depth to depth (.08-.11 instead of .12-.16 in three runs of 60 prompts). The head
    divides by the factor where it reads the verifier's state and multiplies by it where it hands on its own: it drafts
    the same tokens.
    """
    verifier_file, head_file = (out_dir / part / WEIGHTS_FILE for part in ("verifier", "head"))
    verifier, head = load_file(verifier_file), load_file(head_file)
    verifier["model.norm.weight"] = _scaled(verifier["model.norm.weight"], SECOND_SHARPENING)
    embedding_half, state_half = head["pre_projection.weight"].chunk(2, dim=1)  # [M, H] each
    head["pre_projection.weight"] = torch.cat([embedding_half, _scaled(state_half, 1 / SECOND_SHARPENING)], dim=1)
    head["post_projection.weight"] = _scaled(head["post_projection.weight"], SECOND_SHARPENING)
    save_file(verifier, verifier_file, metadata={"format": "pt"})
    save_file(head, head_file, metadata={"format": "pt"})


def _scaled(weight: torch.Tensor, factor: float) -> torch.Tensor:
    """`weight` times `factor`, rounded once."""
    return (weight.float() * factor).to(weight.dtype)


def slm_part(
    out_dir: Path,
    tokenizer: PreTrainedTokenizerFast,
    rows: Sequence[Row],
    steps: int,
    seed: int,
    report: Callable[[float], None],
) -> float:
    """Train, calibrate and store the SLM; returns its loss.

    The activation scales stay 0, "not calibrated". With others transformers would round every activation to 8 bits: the
    phone's have 16, and rounding would turn differences in the last bits of two implementations into whole steps. The
    model card says what 8 bits cost.
    """
    slm, loss = train_slm(load(out_dir / "verifier"), rows, steps=steps, seed=seed, report=report)
    scales = cache_scales(slm, rows[:CALIBRATION_ROWS])
    save_packed(slm, out_dir / "slm", cache_scales=scales, activation_scales={})
    tokenizer.save_pretrained(out_dir / "slm")
    return loss


def measured_part(
    out_dir: Path, tokenizer: PreTrainedTokenizerFast, budget: Budget, seed: int, on_progress: Progress
) -> dict[str, Any]:
    """What the card reports, on sampled answers to held-out questions."""
    questions = [dialogue.messages[0] for dialogue in held_out_corpus()[: budget.measured_prompts]]
    rows = sampled_part(out_dir, questions, tokenizer, seed + 1, lambda share: on_progress("measuring", share))
    return measure_family(out_dir, rows)


def store(model: PreTrainedModel, folder: Path) -> None:
    """Write a model in bfloat16; its float32 values already are bfloat16 values."""
    copy.deepcopy(model).bfloat16().save_pretrained(folder)
    (folder / WEIGHTS_FILE).chmod(0o644)


def load(folder: Path) -> LanguageModel:
    """A stored verifier in float32, frozen."""
    return LanguageModel.from_pretrained(folder, dtype=torch.float32).eval().requires_grad_(False)


def write_conversations(dialogues: Sequence[Dialogue], out_dir: Path) -> None:
    """`conversations.jsonl`: one `{"id", "messages"}` per line."""
    out_dir.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"id": item.id, "messages": list(item.messages)}, ensure_ascii=False) for item in dialogues]
    (out_dir / "conversations.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


@contextmanager
def one_thread() -> Iterator[None]:
    """Run the block on one thread: the order of a sum decides its last bits."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
