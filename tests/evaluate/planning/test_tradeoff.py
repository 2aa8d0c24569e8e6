"""The rows of a sweep: replayed rules, dominated points, table, picture and an evaluation's metric."""

import io
import json
from pathlib import Path

import msgspec
import numpy as np
import pytest
from rich.console import Console

from hyco_export.core.keepset import KeepSet
from hyco_export.core.recipe_loading import embedded_recipe, load_recipe
from hyco_export.errors import HycoError
from hyco_export.evaluate.metrics import measure
from hyco_export.evaluate.planning.grid import Grid, points_of, runs_of
from hyco_export.evaluate.planning.tradeoff import (
    Row,
    Sweep,
    csv_rows,
    marked,
    picture,
    read_quality,
    rows_of,
    sweep_table,
)
from hyco_export.protocol import wire
from hyco_export.protocol.tree import Tree
from tests.evaluate.synthetic_traces import CHAIN, generation, round_trace

KEEPSET = KeepSet(np.arange(60), 128)
BASELINE = measure("cloud-mtp", [generation(round_trace((0,), drafted=4), system="cloud-mtp")], KEEPSET)
PAIR = Tree(tokens=(10, 11), parents=(-1, 0), log_probs=(-0.4, -0.8), sources=(CHAIN, CHAIN))


def row(number: int, g: float, mat: float, metric: float | None = None, replayed: bool = False) -> Row:
    changes = {"drafting.budget": number}
    return Row(number, changes, "hyco", "epsilon", mat, g, g / 2 - 1, 30.0, 9.0, replayed, "traces-1", metric)


def test_a_replayed_rule_shares_times_over_its_own_tokens() -> None:
    """The recorded rule took both nodes, the second by the threshold alone; exact takes one of them."""
    evidence = wire.Evidence([10, 11], [-1, 0], [10, 50, 60], [0.9, 0.1], [0.9, 0.1], [1.0, 1.0, 1.0])
    record = round_trace((0, 1), drawn=(True, False), tokens=(10, 11, 60), tree=PAIR, evidence=evidence)
    traces = [msgspec.structs.replace(generation(record), max_new_tokens=50)]
    recipe = load_recipe(embedded_recipe())
    (run,) = runs_of(points_of(Grid(fields={"rule": ["epsilon", "exact"]}), recipe))
    own, exact = rows_of(run, traces, KEEPSET, BASELINE, {"hyco": 0.5})
    assert (own.mat, own.replayed, own.metric) == (3.0, False, 0.5)
    assert (exact.mat, exact.replayed) == (2.0, True)
    assert own.server_ms_per_token == pytest.approx((7.0 + 3.0) / 4)
    assert exact.server_ms_per_token == pytest.approx((7.0 + 3.0) / 3)
    assert exact.tokens_per_s == pytest.approx(3 / 100.0 * 1000)
    assert exact.draft_ms_per_token == pytest.approx(4.0 / 3)
    assert exact.change == pytest.approx(exact.server_ms_per_token / BASELINE.server_ms_per_token - 1)
    assert own.traces == exact.traces


def test_dominated_points_are_those_that_another_beats() -> None:
    rows = marked([row(3, 1.0, 4.0), row(1, 2.0, 5.0), row(2, 2.0, 4.5), row(4, 2.0, 5.0)])
    assert [(one.number, one.dominated) for one in rows] == [(1, False), (2, True), (3, False), (4, False)]
    judged = marked([row(1, 1.0, 5.0, 0.3), row(2, 2.0, 4.0, 0.9), row(3, 2.0, 4.0, 0.2)])
    assert [one.dominated for one in judged] == [False, False, True]
    partly = marked([row(1, 1.0, 5.0, 0.3), row(2, 2.0, 4.0)])
    assert [one.dominated for one in partly] == [False, True]


def test_table_and_picture_show_every_point() -> None:
    rows = marked([row(1, 1.0, 4.0), row(2, 2.0, 5.0, replayed=True), row(3, 2.01, 4.99), row(4, 3.0, 3.0)])
    sweep = Sweep(BASELINE, rows)
    text = io.StringIO()
    Console(file=text, width=120).print(sweep_table(sweep, "four points"))
    assert all(word in text.getvalue() for word in ("budget", "four points", "replayed", "run"))
    drawn = picture(sweep)
    assert ">2, 3<" in drawn.replace("\n", "")  # so near that they share a label
    assert ">4<" in drawn
    assert "cloud-mtp" in drawn
    assert [list(one)[:2] for one in csv_rows(sweep)] == [["number", "drafting.budget"]] * 4
    with_metric = Sweep(BASELINE, marked([row(1, 1.0, 4.0, 0.2), row(2, 2.0, 5.0, 0.4)]), "rougeL")
    assert "area: rougeL" in picture(with_metric)


def test_a_metric_is_read_of_an_evaluation(tmp_path: Path) -> None:
    quality = [
        {"system": "hyco", "task": task, "metric": "rougeL", "value": value, "count": 9, "run_sd": 0.0}
        for task, value in (("a", 0.2), ("b", 0.4), ("c", None))
    ]
    (tmp_path / "summary.json").write_text(json.dumps({"quality": quality}))
    assert read_quality(tmp_path, "rougeL") == {"hyco": pytest.approx(0.3)}
    with pytest.raises(HycoError, match="has no metric 'judge'"):
        read_quality(tmp_path, "judge")
    (tmp_path / "summary.json").write_text("{}")
    with pytest.raises(HycoError, match="is no summary"):
        read_quality(tmp_path, "rougeL")
