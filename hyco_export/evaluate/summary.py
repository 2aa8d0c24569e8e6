"""The outcome of a validation in the terminal: tables, notes, diagnosis, verdict."""

import math
from typing import Literal

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from hyco_export.errors import counted
from hyco_export.evaluate.gates import failed
from hyco_export.evaluate.metrics import SystemMetrics
from hyco_export.evaluate.report import Report

GATE_HEADING = "what must hold"
UNLIMITED_WIDTH = 10_000  # characters; wider than any table


def summary(report: Report) -> RenderableType:
    """Systems, losslessness, gates, verdict."""
    parts: list[RenderableType] = [_systems(report), _losslessness(report), _parity(report), _gates(report)]
    notes = (*report.notes, *_disturbed_texts(report), *report.diagnosis.notes)
    parts += [Text(f"note: {note}", style="dim") for note in notes]
    parts.append(_diagnosis(report))
    return Group(*parts, _verdict(report))


def _systems(report: Report) -> Table:
    table = plain_table(f"systems ({counted(report.systems[0].prompts, 'prompt')}, device back end {report.backend})")
    table.add_column("system", no_wrap=True)
    for heading in ("MAT", "server ms\nper token", "tok/s", "draft ms\nper token", "taken\nby depth", "B up", "B down"):
        table.add_column(heading, justify="right", no_wrap=True)
    for system in report.systems:
        table.add_row(
            system_name(system),
            number(system.mat, 2),
            server_time(system, report.systems[0]),
            number(system.delivery_tokens_per_s, 1),
            number(system.draft_ms_per_token, 2),
            " ".join(f"{step.share:.2f}".removeprefix("0") for step in system.chain_acceptance),
            f"{system.bytes_up.payload_mean:,.0f}",
            f"{system.bytes_down.payload_mean:,.0f}",
        )
    return table


def system_name(system: SystemMetrics) -> str:
    """The name, and below it the share of unverified tokens."""
    unverified = f"\n{system.unverified_share:.0%} unverified" if system.unverified_tokens else ""
    return system.system + unverified


def number(value: float, digits: int) -> str:
    """The value with so many decimals; empty where nothing was measured."""
    return "" if math.isnan(value) else f"{value:.{digits}f}"


def server_time(system: SystemMetrics, baseline: SystemMetrics) -> str:
    """Server milliseconds per token, and behind them the change against the baseline's; empty without a server."""
    if not system.rounds:
        return ""
    change = system.server_ms_per_token / baseline.server_ms_per_token - 1
    shown = f" ({change:+.0%})" if system.system != baseline.system and not math.isnan(change) else ""
    return number(system.server_ms_per_token, 2) + shown


def _losslessness(report: Report) -> Table:
    table = plain_table("greedy text against the server's plain decoding")
    for heading in ("system", "back end", "prompts", "tokens", "MAT", "texts that differ"):
        table.add_column(heading, justify="left" if heading in ("system", "back end") else "right", no_wrap=True)
    for row in report.losslessness:
        counts = (str(row.prompts), f"{row.tokens:,}", f"{row.mat:.2f}", str(len(row.differences)))
        table.add_row(row.system, row.backend, *counts)
    return table


def _disturbed_texts(report: Report) -> list[str]:
    """A line for each greedy comparison whose calls were disturbed."""
    return [
        f"greedy text of {row.system} on {row.backend}: {row.disturbances}."
        for row in report.losslessness
        if row.disturbances.calls
    ]


def _parity(report: Report) -> Table:
    table = plain_table("parity on saved feeds")
    for heading in ("graph", "candidate", "reference", "positions", "agreement", "SQNR dB"):
        justify: Literal["left", "right"] = "left" if heading in ("graph", "candidate", "reference") else "right"
        table.add_column(heading, justify=justify, no_wrap=True)
    for row in report.parity:
        distance = f"{row.sqnr_db:.1f}" if row.sqnr_db is not None else ""
        table.add_row(row.graph, row.candidate, row.reference, f"{row.positions:,}", f"{row.agreement:.1%}", distance)
    return table


def _gates(report: Report) -> Table:
    table = plain_table("gates")
    for heading in ("", GATE_HEADING, "value", "limit"):
        table.add_column(heading, justify="right" if heading == "value" else "left", no_wrap=heading != GATE_HEADING)
    for gate in report.gates:
        sign = Text("pass", style="green") if gate.passed else Text("FAIL", style="bold red")
        table.add_row(sign, gate.name, gate.value_text, gate.limit_text)
    return table


def _diagnosis(report: Report) -> Text:
    """Each finding with its next step; one line where nothing was found."""
    findings = report.diagnosis.findings
    if not findings:
        taken = " ".join(f"{share:.2f}".removeprefix("0") for share in report.diagnosis.acceptance)
        positions = report.diagnosis.positions
        return Text(f"\ndiagnosis: nothing wrong at {positions} golden positions (chain taken {taken})", style="dim")
    return Text("\n".join(["\ndiagnosis", *(f"  {finding}" for finding in findings)]))


def _verdict(report: Report) -> Text:
    broken = [*failed(report.gates), *(f"{one.fault}, {one.where}" for one in report.diagnosis.findings)]
    if not broken:
        return Text(f"\nPASS: all {len(report.gates)} gates hold", style="bold green")
    return Text("\n".join(["", *(f"FAIL: {reason}" for reason in broken)]), style="bold red")


class WholeTable(Table):
    """A table without lines that shortens no value: columns with `no_wrap` keep their width, others wrap.

    It may be wider than the console, so it is printed with `crop=False`. Without a terminal nothing wraps.
    """

    def __init__(self, title: str, *, show_header: bool = True) -> None:
        super().__init__(
            title=title, title_justify="left", show_header=show_header, box=None, pad_edge=False, padding=(0, 2, 0, 0)
        )

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        unlimited = options.update(max_width=UNLIMITED_WIDTH)
        for column in self.columns:
            if column.no_wrap:
                cells = (column.header, *column.cells)
                column.min_width = max(console.measure(cell, options=unlimited).maximum for cell in cells)
        whole = self.__rich_measure__(console, unlimited)
        if whole.maximum > options.max_width:
            self.width = max(whole.minimum, options.max_width) if console.file.isatty() else whole.maximum
        yield from super().__rich_console__(console, options)


def plain_table(title: str) -> WholeTable:
    """A table without lines, an empty line above its title."""
    return WholeTable(f"\n{title}")
