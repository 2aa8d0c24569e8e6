"""The page's own pictures, in the report's language (`charts`, `pictures`): the trade-off, distributions, contrasts.

Each is drawn at half the page's width, so that two stand side by side and one fills a phone.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from hyco_export.evaluate.charts import FAINT, FONT_PT, HALF_IN, INK, MUTED, SERIES, SURFACE, drawing, to_svg
from hyco_export.evaluate.metrics import SystemMetrics
from hyco_export.evaluate.page.distributions import Distribution
from hyco_export.evaluate.page.intervals import Interval
from hyco_export.evaluate.page.tables import Compared
from hyco_export.evaluate.quality.evaluation_folder import SERVER_TIME, Contrast

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TRADE_OFF_IN, ROW_IN, AXIS_IN = 3.1, 0.36, 0.6  # heights
BINS = 48
TAIL_PERCENT = 99.5  # beyond it a distribution's axis ends: the largest value stands in the table
RIDGE_HEIGHT = 0.78  # of a row
THIN, THICK = 0.9, 1.8
LABEL_GAP = 0.075  # of the axis, between two labels' middles
SMALL_PT = FONT_PT - 1


class Point(msgspec.Struct, frozen=True):
    """A system in the plane of server time and delivery. `dominated`: another one is at least as good in both."""

    name: str
    server_ms: float
    delivered: float
    verified: bool
    dominated: bool
    server_interval: Interval | None
    delivered_interval: Interval | None


def trade_off_points(compared: Compared) -> tuple[Point, ...]:
    """Systems that ask a server; one that commits unverified tokens dominates none, for its text is another."""
    asking = [
        system
        for system in compared.source.systems
        if system.rounds and np.isfinite([system.server_ms_per_token, system.delivery_tokens_per_s]).all()
    ]
    found = []
    for system in asking:
        intervals = compared.intervals.get(system.system, {})
        found.append(
            Point(
                system.system,
                system.server_ms_per_token,
                system.delivery_tokens_per_s,
                not system.unverified_tokens,
                any(_dominates(other, system) for other in asking),
                intervals.get("server_ms_per_token"),
                intervals.get("delivery_tokens_per_s"),
            )
        )
    return tuple(found)


def _dominates(one: SystemMetrics, other: SystemMetrics) -> bool:
    better = one.server_ms_per_token <= other.server_ms_per_token
    faster = one.delivery_tokens_per_s >= other.delivery_tokens_per_s
    return one is not other and not one.unverified_tokens and better and faster


def trade_off(points: Sequence[Point]) -> str:
    """Server time against delivery, with intervals; dominated points are grey, hollow ones commit unverified tokens."""
    with drawing(TRADE_OFF_IN, HALF_IN) as (figure, axes):
        for point in points:
            color = FAINT if point.dominated else SERIES[0]
            for interval, along in ((point.server_interval, True), (point.delivered_interval, False)):
                if interval is not None:
                    ends = (interval.low, interval.high)
                    xs, ys = (ends, (point.delivered,) * 2) if along else ((point.server_ms,) * 2, ends)
                    axes.plot(xs, ys, color=color, linewidth=THIN, zorder=1)
            face = color if point.verified else SURFACE
            axes.plot(
                [point.server_ms], [point.delivered], "o",
                markersize=6, markerfacecolor=face, markeredgecolor=color, markeredgewidth=THICK, zorder=2,
            )  # fmt: skip
        axes.margins(0.12, 0.14)
        _labels(axes, points)
        axes.set_xlabel("server ms per token (less is better)")
        axes.set_title("tokens per s (more is better)", loc="left", color=MUTED, fontsize="medium")
        axes.grid(color=FAINT, linewidth=0.4)
        axes.tick_params(axis="y", labelcolor=MUTED)
        return to_svg(figure)


def _labels(axes: "Axes", points: Sequence[Point]) -> None:
    """Names right of the points, or left of those near the right edge; moved apart where they would overlap."""
    (left, right), (bottom, top) = axes.get_xlim(), axes.get_ylim()
    height = top - bottom
    placed: list[tuple[bool, float]] = []
    for point in sorted(points, key=lambda point: -point.delivered):
        behind = point.server_ms > left + 0.62 * (right - left)
        y = point.delivered
        while any(side == behind and abs(y - other) < LABEL_GAP * height for side, other in placed):
            y -= 0.2 * LABEL_GAP * height
        placed.append((behind, y))
        axes.annotate(
            point.name, (point.server_ms, y), (-4 if behind else 4, 8), textcoords="offset points",
            ha="right" if behind else "left", va="center", fontsize=SMALL_PT, color=MUTED if point.dominated else INK,
        )  # fmt: skip


def ridges(distribution: Distribution) -> str:
    """A histogram a system, each scaled to its own row; a line from p10 to p90, a dot at the median."""
    values = distribution.values
    every = np.concatenate(list(values.values()))
    low, high = float(every.min()), float(np.percentile(every, TAIL_PERCENT))
    whole = float(every.max() - every.min()) <= BINS and bool((every == np.round(every)).all())
    edges = np.arange(low - 0.5, high + 1.5) if whole else np.linspace(low, max(high, low + 1e-9), BINS + 1)
    with drawing(ROW_IN * len(values) + AXIS_IN, HALF_IN) as (figure, axes):
        for row, (_, one) in enumerate(values.items()):
            counts, _ = np.histogram(np.clip(one, edges[0], edges[-1]), edges)
            heights = row - RIDGE_HEIGHT * counts / max(1, counts.max())
            axes.stairs(heights, edges, baseline=row, fill=True, color=SERIES[0], linewidth=0)
            p10, p50, p90 = (min(float(end), float(edges[-1])) for end in np.percentile(one, (10, 50, 90)))
            axes.plot([p10, p90], [row + 0.08] * 2, color=INK, linewidth=THIN, solid_capstyle="butt", clip_on=False)
            axes.plot([p50], [row + 0.08], "o", color=INK, markersize=3, clip_on=False)
        axes.set_yticks(range(len(values)), list(values))
        axes.set_ylim(len(values) - 0.7, -0.95)
        axes.set_xlabel(distribution.measure.unit)
        axes.grid(axis="x", color=FAINT, linewidth=0.4)
        axes.set_axisbelow(True)
        return to_svg(figure)


def contrast_picture(contrasts: Sequence[Contrast]) -> str:
    """Estimates with their intervals, a row each; exploratory ones grey. All of one measure."""
    with drawing(ROW_IN * len(contrasts) + AXIS_IN, HALF_IN) as (figure, axes):
        share = contrasts[0].measure == SERVER_TIME
        unit = 100 if share else 1
        for row, contrast in enumerate(contrasts):
            color = MUTED if contrast.exploratory else SERIES[0]
            axes.plot([unit * contrast.low, unit * contrast.high], [row, row], color=color, linewidth=THICK)
            axes.plot([unit * contrast.estimate], [row], "o", color=color, markersize=5)
        axes.axvline(0, color=INK, linewidth=THIN)
        labels = [f"{one.system}, {one.task}" for one in contrasts]
        axes.set_yticks(range(len(contrasts)), labels)
        axes.set_ylim(len(contrasts) - 0.5, -0.5)
        axes.set_xlabel("difference, %" if share else "difference")
        axes.grid(axis="x", color=FAINT, linewidth=0.4)
        return to_svg(figure)
