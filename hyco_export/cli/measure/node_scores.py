"""What `dev node-scores` does: both scorings over logged trees, at several budgets."""

import shlex
from collections.abc import Sequence
from pathlib import Path

from hyco_export.cli.console import output, show_next, show_rows
from hyco_export.cli.invocation import command_line
from hyco_export.evaluate.planning.node_scores import Comparison, compare
from hyco_export.evaluate.traces import read_traces

WORTH_IT = 0.02  # of MAT: less is not worth an option of the recipe


def compare_scores(paths: Sequence[Path], budgets: Sequence[int]) -> None:
    """Print MAT by budget for each file.

    Raises:
        HycoError: as `compare`.
    """
    for path in paths:
        rows = [compare(read_traces(path), budget) for budget in budgets]
        first = rows[0]
        title = f"{first.system}, {first.prompts} prompts, {first.rounds} rounds, rule {first.rule}"
        show_rows(title, {f"{row.budget} nodes": _cells(row) for row in rows})
    output.print(
        "MAT with the best nodes of the logged trees; fitted on half of the prompts, tested on the other",
        style="dim",
        soft_wrap=True,
    )
    show_next(f"{command_line('replay')} {shlex.quote(str(paths[0]))}")


def _cells(row: Comparison) -> dict[str, str]:
    return {
        "recipe's scores": f"{row.mat:.3f}",
        "calibrated": f"{row.calibrated_mat:.3f}",
        "gain": f"{row.gain:+.1%} [{row.low:+.1%}, {row.high:+.1%}]",
        "all logged nodes": f"{row.whole_mat:.3f}",
        "worth it": "yes" if row.low >= WORTH_IT else "perhaps" if row.high >= WORTH_IT else "no",
    }
