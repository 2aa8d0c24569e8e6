"""What `tables` does: print the paper's smaller tables from folders of traces."""

import math
import shlex
from collections.abc import Sequence
from pathlib import Path

from hyco_export.cli.console import output, show_next, show_rows
from hyco_export.cli.invocation import command_line
from hyco_export.core.files import write_json
from hyco_export.evaluate.quality.trace_tables import Row, folder_rows
from hyco_export.evaluate.summary import number


def print_tables(folders: Sequence[Path], json_path: Path | None) -> None:
    """One table a question; the first system of the first folder is the baseline.

    Raises:
        HycoError: a folder without traces.
    """
    rows = [row for folder in folders for row in folder_rows(folder)]
    if json_path is not None:
        write_json(json_path, rows)
    label = _several if len({row.folder for row in rows}) > 1 else _alone
    base = rows[0]
    show_rows("acceptance, against the first row", {label(row): _acceptance(row, base) for row in rows})
    chains = {label(row): _chain(row) for row in rows if row.cumulative}
    if chains:
        show_rows("share of rounds whose first tokens of the chain were all taken", _filled(chains))
    thresholds = {label(row): row.threshold_only for row in rows if sum(row.threshold_only.values())}
    if thresholds:
        show_rows("tokens that the threshold alone took", {name: _shares(one) for name, one in thresholds.items()})
    show_rows("time to first token, ms", {label(row): _first_token(row) for row in rows})
    if json_path is None:
        given = shlex.join(map(str, folders))
        show_next(f"{command_line('tables')} {given} --json tables.json")
    else:
        output.print(f"tables: {json_path}", soft_wrap=True)


def _alone(row: Row) -> str:
    return row.system


def _several(row: Row) -> str:
    return f"{row.folder}/{row.system}"


def _acceptance(row: Row, base: Row) -> dict[str, str]:
    kept = f"{row.kept_tokens:,}" if row.kept_tokens else ""
    asks = row.rounds > 0
    return {
        "keep set": kept,
        "answers": f"{row.answers:,}",
        "rounds": f"{row.rounds:,}",
        "MAT": number(row.mat, 2),
        "change": _change(row.mat, base.mat) if row is not base else "",
        "server ms per token": number(row.server_ms_per_token, 2) if asks else "",
        "change of it": _change(row.server_ms_per_token, base.server_ms_per_token) if asks and row is not base else "",
    }


def _chain(row: Row) -> dict[str, str]:
    depths = {f"{depth}": f"{share:.1%}" for depth, share in enumerate(row.cumulative, 1)}
    return {**depths, "and a leaf below": f"{row.extended_share:.1%}"}


def _filled(rows: dict[str, dict[str, str]]) -> dict[str, dict[str, str]]:
    """Every row with the columns of all; a chain may be shorter than another."""
    longest = max(rows.values(), key=len)
    return {name: {column: row.get(column, "") for column in longest} for name, row in rows.items()}


def _shares(counts: dict[str, int]) -> dict[str, str]:
    total = sum(counts.values())
    return {"tokens": f"{total:,}", **{name: f"{count / total:.0%}" for name, count in counts.items()}}


def _first_token(row: Row) -> dict[str, str]:
    values = {"mean": row.first_token_mean_ms, "p50": row.first_token_p50_ms, "p90": row.first_token_p90_ms}
    return {name: "" if value is None else f"{value:,.0f}" for name, value in values.items()}


def _change(value: float, base: float) -> str:
    return "" if math.isnan(value) or math.isnan(base) else f"{value / base - 1:+.1%}"
