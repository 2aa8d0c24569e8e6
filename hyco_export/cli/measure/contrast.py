"""What `contrast` does: work out the contrasts, print them, write them into the summary of a single folder."""

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hyco_export.cli.console import output, show_next
from hyco_export.cli.invocation import command_line
from hyco_export.core.files import folder_lock, write_json

if TYPE_CHECKING:
    from rich.table import Table

    from hyco_export.evaluate.quality.evaluation_folder import Contrast
    from hyco_export.evaluate.quality.quality_summary import QualitySummary


def contrast_folders(folders: Sequence[Path], baselines: Sequence[str], json_path: Path | None) -> None:
    """Print every system against the baselines; one folder's summary gets the contrasts.

    Raises:
        ArtifactError: a folder without answers, damaged, or one that another process works in.
        HycoError: an unknown baseline.
    """
    from hyco_export.evaluate.quality.quality_summary import summarise, write_quality

    found = summarise(folders, baselines)
    if len(folders) == 1:
        with folder_lock(folders[0], "evaluation", "working", "another folder"):
            write_quality(folders[0], found)
    show_summary(found)
    if json_path is not None:
        write_json(json_path, found)
    if any(row.metric == "judge" for row in found.quality):
        show_next(f"{command_line('report')} {shlex.join(map(str, folders))}")
    else:
        show_next(f"{command_line('judge')} {shlex.quote(str(folders[0]))} --model MODEL")


def show_summary(found: "QualitySummary", by_task: bool = True) -> None:
    """The table of contrasts, with those of each task or without; then the questions that stand out, one line each."""
    if shown := [row for row in found.contrasts if by_task or not row.exploratory]:
        output.print(_contrasts_table(shown), crop=False)
    for system, runs in found.questions_without_saving.items():
        for run in runs:
            line = f"{run.count} of {run.pairs:,} questions without saving, generation {run.generation}"
            output.print(f"{system}: {line}{_named(run.questions)}", soft_wrap=True)
    for name in dict.fromkeys(row.system for row in found.screen):
        rows = [row for row in found.screen if row.system == name]
        fallen = sum(row.difference < 0.0 for row in rows)
        line = f"judge score 20 points or more lower at {fallen}, higher at {len(rows) - fallen}"
        output.print(f"{name}: {line}{_named([row.question for row in rows])}", soft_wrap=True)
    for note in found.notes:
        output.print(f"note: {note}", style="dim", soft_wrap=True)


def _contrasts_table(rows: "Sequence[Contrast]") -> "Table":
    from hyco_export.evaluate.quality.evaluation_folder import SERVER_TIME
    from hyco_export.evaluate.summary import plain_table

    table = plain_table("contrasts, paired 95 % intervals over questions")
    for heading in ("system", "against", "measure", "task"):
        table.add_column(heading, no_wrap=True)
    for heading in ("change", "from", "to", "questions", "SD of runs"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        task = f"{row.task} (exploratory)" if row.exploratory else row.task
        form = ".1%" if row.measure == SERVER_TIME else ".2f"
        ends = (f"{value:+{form}}" for value in (row.estimate, row.low, row.high))
        spread = "" if row.run_sd is None else f"{row.run_sd:{form}}"
        table.add_row(row.system, row.baseline, row.measure, task, *ends, f"{row.pairs:,}", spread)
    return table


SHOWN = 10  # ids on a line


def _named(questions: Sequence[str]) -> str:
    more = ", ..." if len(questions) > SHOWN else ""
    return f": {', '.join(questions[:SHOWN])}{more}" if questions else ""
