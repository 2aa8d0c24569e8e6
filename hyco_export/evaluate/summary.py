"""The outcome of a validation in the terminal: tables, diagnosis, verdict. Knows rich; measures nothing."""

import math

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from hyco_export.errors import counted
from hyco_export.evaluate.gates import failed
from hyco_export.evaluate.metrics import SystemMetrics
from hyco_export.evaluate.report import Report


def summary(report: Report) -> RenderableType:
    """Systems, losslessness, gates, verdict."""
    parts: list[RenderableType] = [_systems(report), _losslessness(report), _parity(report), _gates(report)]
    parts += [Text(f"note: {note}", style="dim") for note in (*report.notes, *report.diagnosis.notes)]
    parts.append(_diagnosis(report))
    return Group(*parts, _verdict(report))


def _systems(report: Report) -> Table:
    table = plain_table(f"systems ({counted(report.systems[0].prompts, 'prompt')}, device back end {report.backend})")
    table.add_column("system")
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
    """The name, and below it what is unverified and how often calls were disturbed."""
    lines = [system.system]
    if system.unverified_tokens:
        lines.append(f"{system.unverified_share:.0%} unverified")
    return "\n".join([*lines, *filter(None, str(system.disturbances).split(", "))])


def number(value: float, digits: int) -> str:
    """With so many digits behind the point; empty where nothing was measured."""
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
        table.add_column(heading, justify="left" if heading in ("system", "back end") else "right")
    for row in report.losslessness:
        counts = (str(row.prompts), f"{row.tokens:,}", f"{row.mat:.2f}", str(len(row.differences)))
        table.add_row("\n".join(filter(None, (row.system, str(row.disturbances)))), row.backend, *counts)
    return table


def _parity(report: Report) -> Table:
    table = plain_table("parity on saved feeds")
    for heading in ("graph", "candidate", "reference", "positions", "agreement", "SQNR dB"):
        table.add_column(heading, justify="left" if heading in ("graph", "candidate", "reference") else "right")
    for row in report.parity:
        distance = f"{row.sqnr_db:.1f}" if row.sqnr_db is not None else ""
        table.add_row(row.graph, row.candidate, row.reference, f"{row.positions:,}", f"{row.agreement:.1%}", distance)
    return table


def _gates(report: Report) -> Table:
    table = plain_table("gates")
    for heading in ("", "what must hold", "value", "limit"):
        table.add_column(heading, justify="right" if heading == "value" else "left")
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


def plain_table(title: str) -> Table:
    """A table without lines."""
    return Table(title=f"\n{title}", title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0))
