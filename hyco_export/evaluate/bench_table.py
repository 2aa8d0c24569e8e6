"""What the systems of a benchmark amount to, as one table for the terminal. Knows rich; measures nothing."""

from collections.abc import Sequence

from rich.table import Table

from hyco_export.evaluate.metrics import SystemMetrics
from hyco_export.evaluate.summary import number, plain_table, server_time, system_name

HEADINGS = (
    "MAT",
    "server ms\nper token",
    "tok/s",
    "draft ms\nper token",
    "TTFT\nms",
    "B up\na round",
    "B down\na round",
)


def bench_table(systems: Sequence[SystemMetrics], title: str) -> Table:
    """One line a system; the server's time per token with its change against the first."""
    table = plain_table(title)
    table.add_column("system", no_wrap=True)
    for heading in HEADINGS:
        table.add_column(heading, justify="right", no_wrap=True)
    for system in systems:
        table.add_row(
            system_name(system),
            number(system.mat, 2),
            server_time(system, systems[0]),
            number(system.delivery_tokens_per_s, 1),
            number(system.draft_ms_per_token, 2),
            number(system.first_token_ms, 0),
            f"{system.bytes_up.payload_mean:,.0f}",
            f"{system.bytes_down.payload_mean:,.0f}",
        )
    return table
