"""Figures of the paper's smaller tables, from rounds that are written down by hand."""

import json
from pathlib import Path

import pytest

from hyco_export.errors import HycoError
from hyco_export.evaluate.quality.trace_tables import folder_rows, percentile_90, table_row, threshold_only_by_source
from hyco_export.evaluate.traces import write_traces
from tests.evaluate.synthetic_traces import generation, round_trace

# chain 0-1-2, runner-ups 3 and 4, SLM leaves 5 (below 3) and 6 (below 2)
WHOLE, EXTENDED, BROKEN, OTHER = (0, 1, 2), (0, 1, 2, 6), (0,), (3, 5)


def test_a_chain_is_followed_to_its_end_and_below() -> None:
    row = table_row("f", "hyco", [generation(*map(round_trace, (WHOLE, EXTENDED, BROKEN, OTHER)))], 60)
    assert (row.rounds, row.whole_chains, row.extended, row.extended_share) == (4, 2, 1, 0.25)
    assert row.cumulative == (0.75, 0.5, 0.5)
    assert row.mat == (4 + 5 + 2 + 3) / 4
    assert row.server_ms_per_token == (7.0 + 4 * 3.0) / 15
    assert (row.kept_tokens, row.answers) == (60, 1)


def test_a_servers_own_chain_is_extended_by_nothing() -> None:
    row = table_row("f", "cloud-mtp", [generation(round_trace((0, 1), drafted=2), round_trace((), drafted=2))], 0)
    assert (row.cumulative, row.whole_chains, row.extended) == ((0.5, 0.5), 1, 0)


def test_tokens_of_the_threshold_alone_are_told_by_source() -> None:
    rounds = [
        round_trace(EXTENDED, drawn=(True, False, False, False)),
        round_trace(OTHER, drawn=(False, True)),
        round_trace(OTHER, drawn=(True, False), tokens=(20,)),  # cut: the second was not committed
    ]
    assert threshold_only_by_source(rounds) == {"chain": 2, "runner-up": 1, "slm": 1}


def test_first_tokens_by_percentile() -> None:
    traces = [generation(round_trace(BROKEN), first_token_ms=float(n)) for n in range(1, 12)]
    row = table_row("f", "hyco", traces, 0)
    assert (row.first_token_mean_ms, row.first_token_p50_ms, row.first_token_p90_ms) == (6.0, 6.0, 10.0)
    assert percentile_90([3.0]) == 3.0
    alone = table_row("f", "on-device", [generation()], 0)
    assert (alone.cumulative, alone.whole_chains) == ((), 0) and str(alone.mat) == "nan"


def test_a_folder_is_read_in_its_plans_order_and_without_one(tmp_path: Path) -> None:
    for system in ("hyco", "cloud-mtp"):
        write_traces(tmp_path / f"{system}.jsonl", [generation(round_trace(WHOLE), system=system)])
    (tmp_path / "answers.jsonl").write_text("{}\n")
    assert [row.system for row in folder_rows(tmp_path)] == ["cloud-mtp", "hyco"]
    (tmp_path / "plan.json").write_text(json.dumps({"systems": ["hyco", "cloud-mtp"], "kept_tokens": 7, "link": None}))
    assert [(row.system, row.kept_tokens) for row in folder_rows(tmp_path)] == [("hyco", 7), ("cloud-mtp", 7)]
    (tmp_path / "plan.json").write_text("[")
    with pytest.raises(HycoError, match=r"plan\.json cannot be read"):
        folder_rows(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(HycoError, match="holds no traces"):
        folder_rows(tmp_path / "empty")
