"""What `evaluate` does: let systems answer a set's questions, score and compare the answers, print the tables."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from hyco_export.cli.bench import BenchOptions, require_own_server, require_systems, show_systems, with_server
from hyco_export.cli.connection import ConnectOptions
from hyco_export.cli.console import output, show_next, show_rows
from hyco_export.cli.invocation import command_line
from hyco_export.cli.measure.contrast import show_summary
from hyco_export.cli.measure.set_options import SetOptions
from hyco_export.cli.options import open_run, require_built, require_readable_twice
from hyco_export.device.backends import find_backend
from hyco_export.errors import counted
from hyco_export.stages.run_folder import RunFolder

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hyco_export.cli.measure.questions import Answered
    from hyco_export.evaluate.metrics import SystemMetrics
    from hyco_export.evaluate.quality.evaluation_folder import Quality
    from hyco_export.evaluate.quality.judge.endpoint import Endpoint
    from hyco_export.evaluate.quality.quality_summary import QualitySummary

EVALUATION_FOLDER = "evaluation"
DRY_MATS = (3.0, 5.0)  # tokens a round, from which a dry run tells rounds: the span of the paper's systems


class EvaluateOptions(msgspec.Struct, frozen=True):
    """What the command line says; None where the recipe decides."""

    systems: tuple[str, ...]
    backend: str
    asked: SetOptions
    references: tuple[str, ...] = ()
    generations: int = 1
    max_new_tokens: int | None = None
    out: Path | None = None
    retry_failed: bool = False
    evidence: bool = True
    dry_run: bool = False
    judge: "Endpoint | None" = None  # asked about the answers at the end

    @property
    def bench(self) -> BenchOptions:
        """The part that a benchmark has too."""
        return BenchOptions(
            self.systems,
            self.backend,
            self.asked.count,
            self.generations,
            self.max_new_tokens,
            self.out,
            self.asked,
            self.evidence,
        )


def evaluate_run(
    server: str | None,
    recipe_path: Path | None,
    run_dir: Path | None,
    target: str | None,
    options: EvaluateOptions,
    connecting: ConnectOptions,
    device: str | None = None,
) -> None:
    """Evaluate against the server at `server`, or against one of its own for the length of the run.

    Raises:
        HycoError: systems that `require_systems` refuses, an unknown back end, set or file, a device for a server that
            runs already, or a judge without its key.
    """
    require_own_server(server, device)
    require_systems(options.systems)
    find_backend(options.backend)
    options.asked.check(selects_prompts=True)
    if options.judge is not None:
        from hyco_export.evaluate.quality.judge.endpoint import read_key

        read_key(options.judge)  # before hours of work whose end wants it
    if server is None:
        require_readable_twice(recipe_path)
    run = open_run(recipe_path, run_dir, target)
    run.recipe.models.require_head()
    if options.dry_run:
        _say_plan(run, options)
        return
    require_built(run)
    folder = options.out or run.root / EVALUATION_FOLDER
    with_server(
        server,
        recipe_path,
        run.root,
        folder,
        connecting,
        lambda url, reach: _evaluate(run, url, options, reach, folder),
        device,
    )
    _judge(folder, options.judge)


def _say_plan(run: RunFolder, options: EvaluateOptions) -> None:
    """How much would be made; nothing is started."""
    from hyco_export.cli.measure.questions import prompt_limit, read_questions
    from hyco_export.evaluate.quality.evaluation import first_prompt_tokens
    from hyco_export.models.verifier import load_tokenizer

    recipe = run.recipe
    tokenizer = load_tokenizer(run.source("verifier", recipe.models.verifier))
    validation = run.source("validation", recipe.data.validation)
    questions = read_questions(options.asked, recipe, validation, tokenizer)
    turns = sum(len(question.turns) for question in questions)
    answers = turns * len(options.systems) * options.generations
    tokens = answers * (options.max_new_tokens or recipe.validation.max_new_tokens)
    prompts = first_prompt_tokens(questions, tokenizer, prompt_limit(options.asked))
    systems = counted(len(options.systems), "system")
    generations = counted(options.generations, "generation")
    output.print(f"{counted(len(questions), 'question')}, {counted(turns, 'turn')}, {systems}, {generations}")
    output.print(f"answers: {answers:,}")
    output.print(f"prompts: {sum(prompts):,} tokens in the first turns, {max(prompts):,} in the longest")
    fewest, most = (f"{round(tokens / mat):,}" for mat in reversed(DRY_MATS))
    output.print(f"new tokens: {tokens:,} at most; rounds: {fewest} to {most} for them, at {DRY_MATS[1]:.0f} to "
                 f"{DRY_MATS[0]:.0f} tokens a round")  # fmt: skip
    output.print("next: the same command without --dry-run")


def _evaluate(run: RunFolder, url: str, options: EvaluateOptions, connecting: ConnectOptions, folder: Path) -> None:
    from hyco_export.cli.measure.questions import answer_questions, show_coverage

    with answer_questions(
        run, url, options.bench, connecting, folder, options.references, options.retry_failed
    ) as answered:
        show_coverage(answered)  # first: a system whose answers all failed has no figures
        asked = counted(len(answered.questions), "question")
        measured = show_systems(run, answered.plan, answered.store, answered.keepset, asked)
        found = _summarised(answered, measured, folder)
    _show_quality(found.quality, options.systems)
    if options.judge is None:
        show_summary(found, by_task=False)


def _summarised(answered: "Answered", measured: "Sequence[SystemMetrics]", folder: Path) -> "QualitySummary":
    """Put scores and summary into the folder; what a judge has put there stays."""
    from hyco_export.evaluate.quality.evaluation_folder import replace_scores, update_summary
    from hyco_export.evaluate.quality.quality_summary import summarise, write_quality
    from hyco_export.evaluate.quality.reference_metrics import SCORED, score_answers

    references = {question.id: question.references for question in answered.questions}
    replace_scores(folder, SCORED, score_answers(answered.answers, references))
    update_summary(folder, {"coverage": answered.coverage, "systems": measured})
    found = summarise([folder])
    write_quality(folder, found)
    return found


def _judge(folder: Path, judge: "Endpoint | None") -> None:
    """Behind the answers, when no server and no lock is held any more."""
    if judge is None:
        show_next(f"{command_line('report')} {shlex.quote(str(folder))}")
        return
    from hyco_export.cli.measure.judge import JudgeOptions, judge_folder

    judge_folder(folder, judge, JudgeOptions())


def _show_quality(found: "Sequence[Quality]", systems: "Sequence[str]") -> None:
    """One line a task and metric of references, one column a system."""
    from hyco_export.evaluate.quality.contrasts import is_judged

    rows: dict[str, dict[str, str]] = {}
    for one in found:
        if not is_judged(one.metric):
            spread = "" if one.run_sd is None else f" ±{one.run_sd:.1f}"
            label = f"{one.task}, {one.metric} ({counted(one.count, 'question')})"
            rows.setdefault(label, dict.fromkeys(systems, ""))[one.system] = f"{one.value:.1f}{spread}"
    if rows:
        show_rows("answers against references, points of 100", rows)
