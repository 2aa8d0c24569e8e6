"""What `judge` does: say what it will take, ask, keep the scores, print what came back."""

import asyncio
import shlex
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import msgspec

from hyco_export.cli.console import ConsoleProgress, output, show_metrics, show_next, show_rows
from hyco_export.cli.invocation import command_line
from hyco_export.cli.measure.contrast import show_summary
from hyco_export.core.files import folder_lock
from hyco_export.errors import HycoError, counted, interrupt_keeps
from hyco_export.evaluate.quality.evaluation_folder import Answer, Score, read_answers, replace_scores
from hyco_export.evaluate.quality.judge.endpoint import Endpoint, JudgeClient, read_key
from hyco_export.evaluate.quality.judge.helmet import PROMPTS_HINT, REFERENCES_HINT, read_books, read_prompts
from hyco_export.evaluate.quality.judge.judging import (
    NO_BOOKS,
    Books,
    JudgeRequest,
    Size,
    estimate,
    judge,
    metrics_of,
    requests_for,
    scores,
    unanswered,
)
from hyco_export.evaluate.quality.judge.log import JudgementLog, Prices
from hyco_export.evaluate.quality.quality_summary import QualitySummary, summarise, write_quality

CONCURRENCY = 4  # calls at a time
NO_PRICES = Prices(None, None)


class JudgeOptions(msgspec.Struct, frozen=True):
    """What the command line says about whom and how; `systems` is None for all."""

    systems: tuple[str, ...] | None = None
    first_turns: bool = False
    helmet_prompts: Path | None = None
    helmet_references: tuple[Path, ...] = ()
    concurrency: int = CONCURRENCY
    retry_missing: bool = False
    dry_run: bool = False


def judge_folder(folder: Path, endpoint: Endpoint, options: JudgeOptions, prices: Prices = NO_PRICES) -> None:
    """Judge an evaluation's answers; `judgements.jsonl`, `scores.jsonl` and `summary.json` are brought up to date,
    also where the judge stops in the middle.

    Raises:
        ArtifactError: no evaluation there, a damaged one, or another process works in it.
        HycoError: options that do not fit, or an endpoint that cannot be asked.
    """
    answers = read_answers(folder)
    chosen = _chosen(answers, options.systems)
    books = _read_books(options, answers)
    with folder_lock(folder, "evaluation", "working", "another folder"):
        log = JudgementLog(folder)
        requests = requests_for(chosen, endpoint.model, books, options.first_turns)
        todo = unanswered(requests, log, options.retry_missing)
        if options.dry_run:
            _show_plan(todo, len(requests), prices)
            return
        read_key(endpoint)

        def kept() -> str:
            return f"{counted(len(requests) - len(unanswered(requests, log, False)), 'judgement')} in {log.path}"

        try:
            with interrupt_keeps(kept):
                sent = _ask(todo, endpoint, log, options.concurrency) if todo else None
        finally:
            found = scores(answers, endpoint.model, books, options.first_turns, log)
            summary = _keep_scores(folder, metrics_of(books), found)
    show_summary(summary, by_task=False)
    _show_outcome(found, sent, prices)
    output.print(f"replies: {log.path}", soft_wrap=True)
    show_next(f"{command_line('report')} {shlex.quote(str(folder))}")


def _ask(todo: Sequence[JudgeRequest], endpoint: Endpoint, log: JudgementLog, concurrency: int) -> Size:
    async def ask() -> Size:
        async with JudgeClient(endpoint) as client:
            return await judge(todo, client, log, concurrency, bars.step)

    with ConsoleProgress() as bars:
        return asyncio.run(ask())


def _keep_scores(folder: Path, metrics: Sequence[str], found: Sequence[Score]) -> QualitySummary:
    """Scores of all systems, not of the chosen ones alone: rows of the file are replaced by metric."""
    replace_scores(folder, metrics, found)
    summary = summarise([folder])
    write_quality(folder, summary)
    return summary


def _chosen(answers: Sequence[Answer], systems: Sequence[str] | None) -> list[Answer]:
    there = list(dict.fromkeys(answer.system for answer in answers))
    names = there if systems is None else systems
    unknown = [name for name in names if name not in there]
    if unknown or not names:
        said = f"--systems names {', '.join(map(repr, unknown)) or 'no system'}"
        raise HycoError(f"{said}; the evaluation has {', '.join(there)}", "give some of those")
    return [answer for answer in answers if answer.system in names]


def _read_books(options: JudgeOptions, answers: Sequence[Answer]) -> Books:
    if options.helmet_prompts is None and not options.helmet_references:
        return NO_BOOKS
    if options.helmet_prompts is None:
        raise HycoError("--helmet-references without --helmet-prompts", PROMPTS_HINT)
    if not options.helmet_references:
        raise HycoError("--helmet-prompts without --helmet-references", REFERENCES_HINT)
    books = Books(read_prompts(options.helmet_prompts), read_books(options.helmet_references))
    if not any(answer.question in books.references for answer in answers):
        seen = f"its first is {answers[0].question!r}, the references' {next(iter(books.references))!r}"
        raise HycoError(f"no question of the evaluation is among the references: {seen}", REFERENCES_HINT)
    return books


def _show_plan(todo: Sequence[JudgeRequest], planned: int, prices: Prices) -> None:
    size = estimate(todo)
    facts = {"calls": f"{size.calls:,} of {planned:,}, the others are answered"}
    facts |= {"tokens sent, about": f"{size.tokens_in:,}", "tokens of replies, about": f"{size.tokens_out:,}"}
    cost = prices.of(size.tokens_in, size.tokens_out)
    show_metrics("\njudge", facts if cost is None else {**facts, "cost, about": f"{cost:.2f}"})
    output.print("A model that thinks before it replies takes more tokens of replies.", soft_wrap=True)


def _show_outcome(scores: Sequence[Score], sent: Size | None, prices: Prices) -> None:
    rows: dict[str, dict[str, str]] = {}
    for system in dict.fromkeys(score.system for score in scores):
        for metric in dict.fromkeys(score.metric for score in scores if score.system == system):
            own = [score for score in scores if (score.system, score.metric) == (system, metric)]
            values = [score.value for score in own if score.value is not None]
            mean = f"{sum(values) / len(values):.2f}" if values else ""
            rows[f"{system}, {metric}"] = {"mean": mean, "scored": f"{len(values):,}", "of": f"{len(own):,}"}
    if rows:
        show_rows("scores, all tasks and turns", rows)
    reasons = Counter(score.reason.partition(": ")[0] for score in scores if score.value is None)
    for reason, count in reasons.most_common():
        output.print(f"missing: {counted(count, 'score')}, {reason}", soft_wrap=True)
    if sent is None:
        output.print("every answer was judged before; nothing was asked", soft_wrap=True)
        return
    cost = prices.of(sent.tokens_in, sent.tokens_out)
    priced = "" if cost is None else f", cost {cost:.2f}"
    tokens = f"{sent.tokens_in:,} tokens sent, {sent.tokens_out:,} of replies"
    output.print(f"asked: {counted(sent.calls, 'call')}, {tokens}{priced}", soft_wrap=True)
