"""The outcome of a sweep: a row a point, which points are dominated, table and picture."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from rich.table import Table

from hyco_export.core.keepset import KeepSet
from hyco_export.errors import HycoError
from hyco_export.evaluate.charts import FAINT, INK, MUTED, SERIES, drawing, to_svg
from hyco_export.evaluate.metrics import SystemMetrics, measure
from hyco_export.evaluate.planning.grid import Point, Run, recorded, trace_folder
from hyco_export.evaluate.replay import replay
from hyco_export.evaluate.summary import number, plain_table
from hyco_export.protocol.trace import GenerationTrace

HEIGHT_IN = 4.2
MARKER, SMALL, LARGE = 42.0, 24.0, 150.0  # areas of markers: without a metric, of its least and its largest value
NEAR = (0.04, 0.06)  # of the axes' ranges: a label's size
SUMMARY_FILE = "summary.json"


class Row(msgspec.Struct, frozen=True):
    """One point's figures. `replayed`: its rule judged another run's trees, each round on its own; times are that
    run's, over the tokens that the rule commits."""

    number: int
    changes: dict[str, Any]
    system: str
    rule: str
    mat: float
    server_ms_per_token: float
    change: float  # of it against the baseline, as a share
    tokens_per_s: float
    draft_ms_per_token: float
    replayed: bool
    traces: str  # folder of the run that it comes from
    metric: float | None = None  # of the system's answers in an evaluation
    dominated: bool = False


class Sweep(msgspec.Struct, frozen=True):
    """`sweep.json`."""

    baseline: SystemMetrics
    rows: tuple[Row, ...]
    metric: str | None = None


def rows_of(
    run: Run, traces: Sequence[GenerationTrace], keepset: KeepSet, baseline: SystemMetrics, quality: Mapping[str, float]
) -> tuple[Row, ...]:
    """The figures of the points that a run serves."""
    seen, own = measure(run.system, traces, keepset), recorded(run)
    rows = (_row(point, seen, traces, point.acceptance != own, baseline) for point in run.points)
    folder, metric = trace_folder(run), quality.get(run.system)
    return tuple(msgspec.structs.replace(row, traces=folder, metric=metric) for row in rows)


def _row(
    point: Point,
    seen: SystemMetrics,
    traces: Sequence[GenerationTrace],
    replayed: bool,
    baseline: SystemMetrics,
) -> Row:
    mat = replay(traces, point.acceptance).mat if replayed else seen.mat
    primed = seen.output_tokens - seen.mat * seen.rounds
    share = seen.output_tokens / (primed + mat * seen.rounds)  # of the run's times over the tokens of this rule
    cost = seen.server_ms_per_token * share
    return Row(
        number=point.number,
        changes=point.changes,
        system=point.system,
        rule=point.acceptance.rule,
        mat=mat,
        server_ms_per_token=cost,
        change=cost / baseline.server_ms_per_token - 1,
        tokens_per_s=seen.delivery_tokens_per_s / share,
        draft_ms_per_token=seen.draft_ms_per_token * share,
        replayed=replayed,
        traces="",
    )


def marked(rows: Sequence[Row]) -> tuple[Row, ...]:
    """By number, the dominated ones marked: another point is at least as good in g, MAT and metric, and better in one.
    A metric counts where every point has one."""
    judged = all(row.metric is not None for row in rows)
    aims = np.array([(-row.server_ms_per_token, row.mat, (row.metric or 0.0) if judged else 0.0) for row in rows])
    found = []
    for row, own in zip(rows, aims, strict=True):
        beaten = ((aims >= own).all(axis=1) & (aims > own).any(axis=1)).any()
        found.append(msgspec.structs.replace(row, dominated=bool(beaten)))
    return tuple(sorted(found, key=lambda row: row.number))


def read_quality(folder: Path, metric: str) -> dict[str, float]:
    """A metric's mean over the tasks, by system, of an evaluation's folder.

    Raises:
        HycoError: no finished evaluation there, or one without this metric.
    """
    path = folder / SUMMARY_FILE
    try:
        quality = json.loads(path.read_bytes())["quality"]
        rows = [(str(row["system"]), str(row["metric"]), row["value"]) for row in quality]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise HycoError(f"{path} is no summary of an evaluation: {error}", "finish the evaluation first") from error
    found: dict[str, list[float]] = {}
    for system, name, value in rows:
        if name == metric and value is not None:
            found.setdefault(system, []).append(float(value))
    if not found:
        known = ", ".join(sorted({name for _, name, _ in rows})) or "none"
        raise HycoError(f"{path} has no metric {metric!r}", f"known ones there: {known}")
    return {system: sum(values) / len(values) for system, values in found.items()}


def sweep_table(sweep: Sweep, title: str) -> Table:
    """One line a point; dominated ones dim."""
    fields = list(dict.fromkeys(name for row in sweep.rows for name in row.changes))
    table = plain_table(title)
    for heading in ("", *(name.rpartition(".")[2].replace("_", "\n") for name in fields)):
        table.add_column(heading, justify="right")
    metric = [sweep.metric] if sweep.metric else []
    for heading in ("MAT", "server ms\nper token", "tok/s", "draft ms\nper token", *metric, "trees"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in sweep.rows:
        value = [number(row.metric, 3) if row.metric is not None else ""] if sweep.metric else []
        table.add_row(
            str(row.number),
            *(str(row.changes.get(name, "")) for name in fields),
            number(row.mat, 2),
            f"{number(row.server_ms_per_token, 2)} ({row.change:+.0%})",
            number(row.tokens_per_s, 1),
            number(row.draft_ms_per_token, 2),
            *value,
            "replayed" if row.replayed else "run",
            style="dim" if row.dominated else "",
        )
    return table


def csv_rows(sweep: Sweep) -> list[dict[str, Any]]:
    """Flat rows for a table file."""
    fields = list(dict.fromkeys(name for row in sweep.rows for name in row.changes))
    names = [name for name in Row.__struct_fields__ if name not in ("changes", "number")]
    return [
        {"number": row.number, **{f: row.changes.get(f, "") for f in fields}, **{n: getattr(row, n) for n in names}}
        for row in sweep.rows
    ]


def picture(sweep: Sweep) -> str:
    """Inline SVG: server time against MAT, a numbered marker a point, dominated ones grey, the others joined. With a
    metric the marker's area says it."""
    values = [row.metric for row in sweep.rows if row.metric is not None]
    with drawing(HEIGHT_IN) as (figure, axes):
        for row in sweep.rows:
            color = MUTED if row.dominated else SERIES[0]
            axes.scatter(
                row.server_ms_per_token,
                row.mat,
                s=_area(row.metric, values),
                color="none" if row.replayed else (FAINT if row.dominated else color),
                edgecolors=color,
                linewidths=1.2,
                zorder=2 if row.dominated else 3,
            )
        if not values:  # with a metric the best points are no line in this plane
            best = sorted((row.server_ms_per_token, row.mat) for row in sweep.rows if not row.dominated)
            axes.plot(*zip(*best, strict=True), color=SERIES[0], linewidth=1, zorder=1)
        for (x, y), text, color in _labels(sweep.rows):
            axes.annotate(text, (x, y), (6, 5), textcoords="offset points", color=color, fontsize="small")
        base = sweep.baseline
        axes.scatter(base.server_ms_per_token, base.mat, marker="x", color=INK, s=MARKER, zorder=3)
        axes.annotate(
            base.system,
            (base.server_ms_per_token, base.mat),
            (-7, -3),
            textcoords="offset points",
            color=INK,
            fontsize="small",
            ha="right",
        )
        axes.set_xlabel("server ms per token")
        axes.set_title(_title(sweep), loc="left", color=MUTED, fontsize="medium")
        axes.tick_params(axis="y", labelcolor=MUTED)
        axes.grid(color=FAINT, linewidth=0.5)
        axes.set_axisbelow(True)
        axes.margins(0.08)
        return to_svg(figure)


def _title(sweep: Sweep) -> str:
    area = f"; area: {sweep.metric}" if sweep.metric else ""
    return f"MAT; hollow: replayed, grey: dominated{area}"


def _area(metric: float | None, values: Sequence[float]) -> float:
    if metric is None or not values or min(values) == max(values):
        return MARKER
    return SMALL + (LARGE - SMALL) * (metric - min(values)) / (max(values) - min(values))


def _labels(rows: Sequence[Row]) -> list[tuple[tuple[float, float], str, str]]:
    """Numbers beside markers; points so near that their numbers would overlap share a label."""
    places = np.array([(row.server_ms_per_token, row.mat) for row in rows])
    room = np.maximum(np.ptp(places, axis=0), 1e-9) * NEAR
    groups: list[list[int]] = []
    for index in range(len(rows)):
        near = (group for group in groups if (abs(places[group[0]] - places[index]) < room).all())
        group = next(near, None)
        if group is None:
            groups.append([index])
        else:
            group.append(index)
    return [
        (
            (float(places[group, 0].max()), float(places[group, 1].max())),
            ", ".join(str(rows[index].number) for index in group),
            MUTED if all(rows[index].dominated for index in group) else INK,
        )
        for group in groups
    ]
