"""A set's questions answered by systems: what `evaluate`, and `bench` over a set, have in common."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from hyco_export.cli.bench import BenchOptions, bench_plan
from hyco_export.cli.connection import ConnectOptions, direct_transport, transport_to
from hyco_export.cli.console import ConsoleProgress, output, problems
from hyco_export.cli.measure.set_options import SetOptions
from hyco_export.cli.validation import subject_of
from hyco_export.core.data.prompts import require_enough
from hyco_export.core.files import folder_lock
from hyco_export.core.keepset import KeepSet
from hyco_export.core.recipe import Recipe
from hyco_export.errors import counted
from hyco_export.evaluate.quality.answers import coverage
from hyco_export.evaluate.quality.evaluation import Evaluation, EvaluationPlan
from hyco_export.evaluate.quality.evaluation_folder import Answer, turn_id
from hyco_export.evaluate.quality.novels import NOVELS, PROMPT_TOKENS
from hyco_export.evaluate.quality.prefill_progress import WatchedTransport
from hyco_export.evaluate.quality.prompt_sets import (
    Question,
    Selection,
    conversations,
    questions_digest,
    read_set,
    set_name,
)
from hyco_export.evaluate.quality.references import with_references
from hyco_export.evaluate.traces import TraceStore
from hyco_export.stages.run_folder import RunFolder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

SHOWN_FAILURES = 5  # kinds of failure on the terminal; answers.jsonl has all


class Answered(msgspec.Struct, frozen=True):
    """A folder whose answers are made."""

    plan: EvaluationPlan
    questions: tuple[Question, ...]
    store: TraceStore
    keepset: KeepSet
    answers: tuple[Answer, ...]

    @property
    def coverage(self) -> dict[str, tuple[int, int]]:
        """By system: answers there are, answers planned."""
        return coverage(self.answers, (answer.place for answer in self.answers))


def read_questions(
    asked: SetOptions, recipe: Recipe, validation: Path, tokenizer: "PreTrainedTokenizerFast"
) -> tuple[Question, ...]:
    """The questions of a set, or the recipe's first validation prompts.

    Raises:
        HycoError: no such set or file, or not of its layout.
    """
    if asked.prompts is not None and asked.is_set:
        found = read_set(asked.prompts, tokenizer, asked.truncate or PROMPT_TOKENS)
    else:
        found = conversations(validation)
        require_enough(len(found), asked.count or recipe.validation.prompts, validation)
        found = found[: asked.count or recipe.validation.prompts]
    return Selection(asked.per_category, asked.limit).of(found)


def prompt_limit(asked: SetOptions) -> int | None:
    """Ids of a prompt, at most; a novel is cut before it becomes one."""
    return None if (asked.prompts or "").startswith(NOVELS) else asked.truncate


@contextmanager
def answer_questions(
    run: RunFolder,
    url: str,
    options: BenchOptions,
    connecting: ConnectOptions,
    folder: Path,
    references: tuple[str, ...] = (),
    retry_failed: bool = False,
) -> Iterator[Answered]:
    """Make the answers that `folder` lacks; it is locked until the block ends.

    Raises:
        HycoError: as `connect`, `read_questions` and `with_references`; another run's folder.
        ServerError: the server went away; what is finished stays.
    """
    from hyco_export.evaluate.connect import connect
    from hyco_export.evaluate.runs import DeviceRunner

    transport, clock = transport_to(url, connecting, run.recipe.validation.seed)
    subject = subject_of(run)
    connection = connect(subject, url, transport)
    questions = read_questions(options.asked, run.recipe, subject.prompts, connection.tokenizer)
    for file in references:
        questions, matched = with_references(questions, file)
        output.print(str(matched), soft_wrap=True)
    names = tuple(turn_id(one.id, turn) for one in questions for turn in range(1, len(one.turns) + 1))
    base = bench_plan(run, connection, connecting, options, names, questions_digest(questions))
    plan = EvaluationPlan(
        **{name: getattr(base, name) for name in base.__struct_fields__},
        prompt_set=set_name(options.asked.prompts or "") if options.asked.is_set else "validation",
        truncate=prompt_limit(options.asked),
    )
    keepset = connection.artifacts.keepset
    with folder_lock(folder, "evaluation folder", "evaluating", "--out"):
        store = TraceStore(folder, plan, plan.systems)
        with ConsoleProgress() as bars:
            watched = WatchedTransport(transport, direct_transport(url, connecting).prefilled, bars.step)
            device = DeviceRunner(
                connection.artifacts, run.recipe, watched, connection.info, trace=plan.evidence, clock=clock
            )
            with device as runner:
                work = Evaluation(plan, questions, runner, connection.info, connection.tokenizer, keepset, store)
                answers = work.run(bars.step, retry_failed)
        yield Answered(plan, questions, store, keepset, answers)


def show_coverage(answered: Answered) -> None:
    """How many answers there are of how many, and why the others failed."""
    for system, (done, planned) in answered.coverage.items():
        output.print(f"coverage: {system} {done} of {planned}", soft_wrap=True)
    failures = Counter(answer.failure for answer in answered.answers if answer.failure is not None)
    for failure, count in failures.most_common(SHOWN_FAILURES):
        problems.print(f"failed: {counted(count, 'answer')}: {failure}", soft_wrap=True)
    if len(failures) > SHOWN_FAILURES:
        problems.print(f"failed: {len(failures) - SHOWN_FAILURES} other reasons, in answers.jsonl", soft_wrap=True)
