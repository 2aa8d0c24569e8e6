"""The report's pictures: acceptance by depth, tokens by source, a round's timeline, one drawn tree; each an inline SVG.

Legends are the page's (`evaluate.canvas.css_colors`). Knows the shapes of figures; measures nothing.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from hyco_export.evaluate.canvas import FAINT, FONT_PT, INK, MUTED, SERIES, SURFACE, drawing, to_svg
from hyco_export.evaluate.examples import DrawnTree, RoundTimes
from hyco_export.evaluate.metrics import BONUS, SystemMetrics
from hyco_export.evaluate.tree_layout import layout
from hyco_export.runtime.tree import ROOT, Source

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SOURCE_COLORS = {"chain": SERIES[0], "runner-up": SERIES[1], "slm": SERIES[2], BONUS: SERIES[3]}
NODE_COLORS = {Source.CHAIN: SERIES[0], Source.RUNNER_UP: SERIES[1], Source.SLM: SERIES[2]}
PHASE_COLORS = {
    "head": SERIES[0],
    "slm": SERIES[2],
    "scoring": SERIES[1],
    "transfer": FAINT,
    "server": SERIES[3],
    "commit": SERIES[4],
}

PLOT_HEIGHT_IN = 2.6
ROW_IN = 0.46  # a horizontal bar with its gap
AXIS_IN = 0.55  # below horizontal bars: ticks and label
LEAF_IN = 0.28  # a row of the tree with its gap
LABELLED_SHARE = 0.05  # of the longest bar; narrower segments get no number
LABELLED_HEIGHT = 0.1  # a lower bar has its number above
GROUP_SHARE = 0.8  # of the distance between two groups of bars
SMALL_PT = FONT_PT - 1
THICK, THIN = 1.8, 0.9  # lines of the accepted path, of the others


def system_colors(names: Iterable[str]) -> dict[str, str]:
    """One colour a system, in order."""
    return {name: SERIES[index % len(SERIES)] for index, name in enumerate(names)}


def acceptance_by_depth(systems: Sequence[SystemMetrics], assumed: float) -> str:
    """Bars of the chain's conditional acceptance, one group a depth; the line is what the scoring rule assumes."""
    with drawing(PLOT_HEIGHT_IN) as (figure, axes):
        width = GROUP_SHARE / len(systems)
        colors = system_colors(system.system for system in systems)
        for index, system in enumerate(systems):
            for step in system.chain_acceptance:
                middle = step.depth - GROUP_SHARE / 2 + (index + 0.5) * width
                axes.bar(middle, step.share, width * 0.92, color=colors[system.system])
                inside = step.share > LABELLED_HEIGHT
                base, ink = (0.02, SURFACE) if inside else (step.share + 0.02, INK)
                axes.text(middle, base, f"{step.share:.2f}", ha="center", va="bottom", fontsize=SMALL_PT, color=ink)
        depths = sorted({step.depth for system in systems for step in system.chain_acceptance})
        axes.axhline(assumed, color=INK, linewidth=THIN, linestyle=(0, (4, 3)))
        axes.text(depths[-1] + 0.47, assumed + 0.015, f"assumed {assumed:.2f}", ha="left", va="bottom", color=MUTED)
        axes.set_xticks(depths, [f"depth {depth}" for depth in depths])
        axes.set_xlim(depths[0] - 0.5, depths[-1] + 0.95)
        axes.set_yticks([0, 0.5, 1])
        axes.set_ylim(0, 1.05)
        axes.tick_params(axis="y", labelcolor=MUTED)
        axes.grid(axis="y", color=FAINT, linewidth=0.5)
        axes.set_axisbelow(True)
        return to_svg(figure)


def tokens_by_source(systems: Sequence[SystemMetrics]) -> str:
    """Bars of tokens per verify round, split by who proposed them; their length is MAT."""
    rows = [
        (system.system, {name: count / system.rounds for name, count in system.tokens_by_source.items()})
        for system in systems
        if system.rounds
    ]
    return _stacked_bars(rows, SOURCE_COLORS, "tokens committed per verify round", "{:.2f}")


def round_timeline(times: Sequence[RoundTimes]) -> str:
    """Bars of a round's phases in the order in which they happen."""
    rows = [(entry.system, entry.phases) for entry in times]
    return _stacked_bars(rows, PHASE_COLORS, "milliseconds, medians over all rounds on this machine", "{:.1f}")


def draft_tree(tree: DrawnTree) -> str:
    """Nodes as pills by depth; the accepted path is filled, its threshold-only nodes dashed, the bonus at its end."""
    bonus = len(tree.parents)  # drawn as one more child of the path's endpoint
    parents = (*tree.parents, tree.accepted[-1] if tree.accepted else ROOT)
    columns, rows = layout(parents, (*tree.sources, len(Source)))
    taken = {*tree.accepted, bonus}
    by_threshold = {row for row, drawn in zip(tree.accepted, tree.drawn, strict=False) if not drawn}
    with drawing(LEAF_IN * (max(rows.values()) + 2)) as (figure, axes):
        for node, parent in enumerate(parents):
            _edge(axes, (columns[parent], rows[parent]), (columns[node], rows[node]), node in taken)
        _pill(axes, columns[ROOT], rows[ROOT], tree.root, INK, filled=True)
        for node, label in enumerate(tree.labels):
            color = NODE_COLORS[Source(tree.sources[node])]
            _pill(axes, columns[node], rows[node], label, color, filled=node in taken, dashed=node in by_threshold)
        _pill(axes, columns[bonus], rows[bonus], tree.bonus, SOURCE_COLORS[BONUS], filled=True)
        axes.set_xlim(-0.5, max(columns.values()) + 0.5)
        axes.set_ylim(max(rows.values()) + 0.75, -0.75)
        axes.axis("off")
        return to_svg(figure)


def _stacked_bars(
    rows: Sequence[tuple[str, Mapping[str, float]]], colors: Mapping[str, str], label: str, number: str
) -> str:
    with drawing(ROW_IN * len(rows) + AXIS_IN) as (figure, axes):
        longest = max(sum(parts.values()) for _, parts in rows)
        for index, (_, parts) in enumerate(rows):
            left = 0.0
            for name, value in parts.items():
                axes.barh(index, value, left=left, height=0.62, color=colors[name], edgecolor=SURFACE, linewidth=1)
                if value > LABELLED_SHARE * longest:
                    ink = INK if colors[name] == FAINT else SURFACE
                    axes.text(left + value / 2, index, number.format(value), ha="center", va="center", color=ink)
                left += value
            total = number.format(left)
            axes.text(left + 0.01 * longest, index, total, ha="left", va="center", fontweight="bold")
        axes.set_yticks(range(len(rows)), [name for name, _ in rows])
        axes.set_ylim(len(rows) - 0.5, -0.5)
        axes.set_xlim(0, longest * 1.1)
        axes.set_xlabel(label)
        return to_svg(figure)


def _edge(axes: "Axes", start: tuple[float, float], end: tuple[float, float], taken: bool) -> None:
    """A curve that leaves and arrives horizontally."""
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path

    middle = (start[0] + end[0]) / 2
    points = [start, (middle, start[1]), (middle, end[1]), end]
    curve = Path(points, [Path.MOVETO, Path.CURVE4, Path.CURVE4, Path.CURVE4])
    style = {"edgecolor": INK, "linewidth": THICK} if taken else {"edgecolor": FAINT, "linewidth": THIN}
    axes.add_patch(PathPatch(curve, fill=False, zorder=2 if taken else 1, **style))


def _pill(axes: "Axes", x: float, y: float, label: str, color: str, *, filled: bool, dashed: bool = False) -> None:
    box = {
        "boxstyle": "round,pad=0.3,rounding_size=0.6",
        "facecolor": color if filled else SURFACE,
        "edgecolor": INK if dashed else color,
        "linewidth": THIN,
        "linestyle": (0, (2, 2)) if dashed else "solid",
    }
    ink = SURFACE if filled else INK
    axes.text(x, y, label, ha="center", va="center", color=ink, fontsize=SMALL_PT, bbox=box, zorder=3)
