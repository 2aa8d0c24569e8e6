"""Percentiles of times and bytes."""

import statistics

import msgspec
import pytest

from hyco_export.evaluate.metrics import evidence_bytes
from hyco_export.evaluate.page.distributions import distributions, percentile_table
from hyco_export.evaluate.page.sources import Source


def test_percentiles_are_of_all_rounds(bench: Source) -> None:
    found = {one.measure.name: one for one in distributions(bench)}
    records = [record for trace in bench.traces["hyco"] for record in trace.rounds]
    table = percentile_table(found["the server's time of a round"])
    row = {column.label: cell.value for column, cell in zip(table.columns, table.rows[1], strict=True)}
    server = [record.server_ms for record in records]
    assert (row["system"], row["count"], row["largest"]) == ("hyco", len(server), max(server))
    assert row["p50"] == pytest.approx(statistics.median(server)) and row["mean"] == pytest.approx(
        statistics.mean(server)
    )
    assert row["p10"] == pytest.approx(statistics.quantiles(server, n=10, method="inclusive")[0])
    replies = sorted(found["a round's reply, body"].values["hyco"])
    assert replies == sorted(record.traffic.payload_down_bytes - evidence_bytes(record) for record in records)


def test_disturbed_rounds_are_in_none(bench: Source) -> None:
    trace = bench.traces["hyco"][0]
    late = msgspec.structs.replace(trace.rounds[0], lost_ms=5000.0, wait_ms=5000.0)
    disturbed = msgspec.structs.replace(trace, rounds=(late, *trace.rounds[1:]))
    source = msgspec.structs.replace(bench, traces={"hyco": (disturbed,)})
    round_ms = distributions(source)[0].values
    assert (
        list(round_ms) == ["hyco"] and round_ms["hyco"].size == len(trace.rounds) - 1 and round_ms["hyco"].max() < 1000
    )


def test_what_is_nothing_everywhere_is_not_shown(bench: Source) -> None:
    silent = [
        msgspec.structs.replace(
            trace, rounds=tuple(msgspec.structs.replace(one, server_ms=0.0) for one in trace.rounds)
        )
        for trace in bench.traces["hyco"]
    ]
    source = msgspec.structs.replace(bench, traces={"hyco": tuple(silent)})
    assert "the server's time of a round" not in [one.measure.name for one in distributions(source)]
