"""What the systems of a benchmark amount to, as one table for the terminal. Knows rich; measures nothing."""

from collections.abc import Sequence

from rich.table import Table

from hyco_export.evaluate.metrics import SystemMetrics
from hyco_export.evaluate.summary import plain_table, server_time

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
            system.system,
            f"{system.mat:.2f}" if system.rounds else "",
            server_time(system, systems[0]),
            f"{system.delivery_tokens_per_s:.1f}",
            f"{system.draft_ms_per_token:.2f}",
            f"{system.first_token_ms:.0f}",
            f"{system.bytes_up.payload_mean:,.0f}",
            f"{system.bytes_down.payload_mean:,.0f}",
        )
    return table
