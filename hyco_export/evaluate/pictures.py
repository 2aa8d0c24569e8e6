"""The report's pictures: acceptance by depth, tokens by source, a round's timeline, one drawn tree; each an inline SVG.

Their legends are part of the page (`charts.css_colors`).
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from hyco_export.evaluate.charts import FAINT, FONT_PT, INK, SERIES, SURFACE, WIDTH_IN, drawing, to_svg
from hyco_export.evaluate.metrics import BONUS, SystemMetrics, taken, timed_steps
from hyco_export.protocol.trace import GenerationTrace, RoundTrace
from hyco_export.protocol.tree import ROOT, Source

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LABEL_LENGTH = 12  # characters of a token in a picture
SPACE_MARK, NEWLINE_MARK, EMPTY_MARK = "·", "⏎", "∅"
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
ROW_IN = 0.46  # a horizontal bar with its gap
AXIS_IN = 0.55  # below horizontal bars: ticks and label
LEAF_IN = 0.28  # a row of the tree with its gap
NAMES_IN = 1.3  # of a picture's width: the names of rows
LABELLED_IN = 0.3  # a narrower segment gets no number
LABELLED_WIDTH = 0.3  # of a depth's column; a shorter bar has its number behind it
COLUMN_PITCH = 1.15  # from one depth's column to the next, in its widths
BAR_HEIGHT = 0.62  # of a row
SMALL_PT = FONT_PT - 1
THICK, THIN = 1.8, 0.9  # lines of the accepted path, of the others


def layout(parents: Sequence[int], ranks: Sequence[int]) -> tuple[dict[int, int], dict[int, int]]:
    """Columns and rows by node, ROOT included; siblings stand in the order of (rank, node)."""
    children: dict[int, list[int]] = {node: [] for node in (ROOT, *range(len(parents)))}
    for node, parent in enumerate(parents):
        children[parent].append(node)
    columns, rows = {ROOT: 0}, {ROOT: 0}
    free: Counter[int] = Counter()  # first free row by column
    stack = _last_first(children[ROOT], ranks)
    while stack:
        node = stack.pop()
        column = columns[parents[node]] + 1
        columns[node], rows[node] = column, max(free[column], rows[parents[node]])
        free[column] = rows[node] + 1
        stack.extend(_last_first(children[node], ranks))
    return columns, rows


def _last_first(nodes: Sequence[int], ranks: Sequence[int]) -> list[int]:
    return sorted(nodes, key=lambda node: (ranks[node], node), reverse=True)


class RoundTimes(msgspec.Struct, frozen=True):
    """Medians over a system's undisturbed rounds, in the order in which things happen."""

    system: str
    head_ms: float
    slm_ms: float
    scoring_ms: float
    transfer_ms: float  # waiting for the reply beyond the server's own time: both ways, HTTP, queueing
    server_ms: float
    commit_ms: float

    @property
    def phases(self) -> dict[str, float]:
        """Milliseconds by phase, in order."""
        return {
            name.removesuffix("_ms"): getattr(self, name) for name in self.__struct_fields__ if name.endswith("_ms")
        }


class DrawnTree(msgspec.Struct, frozen=True):
    """One round's tree; rows as they were sent."""

    system: str
    prompt_id: str
    round: int
    root: str
    labels: tuple[str, ...]
    parents: tuple[int, ...]
    sources: tuple[int, ...]
    accepted: tuple[int, ...]
    drawn: tuple[bool, ...]
    bonus: str


def median_times(system: str, traces: Sequence[GenerationTrace]) -> RoundTimes | None:
    """Median of every phase over all undisturbed rounds; None where there is none."""
    rounds = timed_steps(traces).rounds
    if not rounds:
        return None
    table = np.array(
        [
            (
                record.head_ms,
                record.slm_ms,
                max(0.0, record.draft_ms - record.head_ms - record.slm_ms),
                max(0.0, record.wait_ms - record.server_ms),  # drafting meanwhile is part of the wait
                record.server_ms,
                record.commit_ms,
            )
            for record in rounds
        ]
    )  # [rounds, 6]
    return RoundTimes(system, *(float(value) for value in np.median(table, axis=0)))


def pick_tree(traces: Sequence[GenerationTrace], text_of: Callable[[int], str]) -> DrawnTree | None:
    """The first of the most telling rounds: most kinds of drafters accepted, then the longest path.

    Rounds that ended an answer are left out: their path may be cut. None when no other round sent a tree.
    """
    candidates = [
        (trace, record) for trace in traces for record in trace.rounds if len(record.tree) and not record.finished
    ]
    if not candidates:
        return None
    trace, record = max(candidates, key=lambda pair: (_kinds(pair[1]), len(pair[1].accepted)))
    return DrawnTree(
        system=trace.system,
        prompt_id=trace.prompt_id,
        round=record.round,
        root=label(text_of(trace.tokens[record.length + len(record.kept) - trace.prompt_length - 1])),
        labels=tuple(label(text_of(token)) for token in record.tree.tokens),
        parents=record.tree.parents,
        sources=tuple(int(source) for source in record.tree.sources),
        accepted=record.accepted,
        drawn=record.drawn,
        bonus=label(text_of(record.tokens[-1])),
    )


def label(text: str) -> str:
    """A token's text in one short line; spaces and line ends become visible."""
    shown = text.replace("\n", NEWLINE_MARK).replace(" ", SPACE_MARK) or EMPTY_MARK
    shown = "".join(letter if letter.isprintable() else "�" for letter in shown)
    return shown if len(shown) <= LABEL_LENGTH else shown[: LABEL_LENGTH - 1] + "…"


def _kinds(record: RoundTrace) -> int:
    return len({record.tree.sources[row] for row in taken(record)})


def acceptance_by_depth(systems: Sequence[SystemMetrics], assumed: float | None, width_in: float = WIDTH_IN) -> str:
    """Bars of the chain's conditional acceptance: a row a system, a column a depth; dashed: what scoring assumes."""
    with drawing(ROW_IN * len(systems) + AXIS_IN, width_in) as (figure, axes):
        depths = sorted({step.depth for system in systems for step in system.chain_acceptance})
        starts = {depth: column * COLUMN_PITCH for column, depth in enumerate(depths)}  # a column is 1 wide
        for row, system in enumerate(systems):
            for step in system.chain_acceptance:
                start, inside = starts[step.depth], step.share > LABELLED_WIDTH
                axes.barh(row, step.share, left=start, height=BAR_HEIGHT, color=SERIES[0])
                place, ink = (start + 0.03, SURFACE) if inside else (start + step.share + 0.03, INK)
                axes.text(place, row, f"{step.share:.2f}", ha="left", va="center", color=ink)
        for start in starts.values():
            if assumed is not None:
                axes.axvline(start + assumed, color=INK, linewidth=THIN, linestyle=(0, (4, 3)))
            axes.axvline(start, color=FAINT, linewidth=THIN)
        axes.set_xticks([start + 0.5 for start in starts.values()], [f"depth {depth}" for depth in depths])
        axes.set_xlim(0, COLUMN_PITCH * (len(depths) - 1) + 1)
        axes.set_yticks(range(len(systems)), [system.system for system in systems])
        axes.set_ylim(len(systems) - 0.5, -0.5)
        return to_svg(figure)


def tokens_by_source(systems: Sequence[SystemMetrics], width_in: float = WIDTH_IN) -> str:
    """Bars of tokens per verify round, split by who proposed them; their length is MAT."""
    rows = [
        (system.system, {name: count / system.rounds for name, count in system.tokens_by_source.items()})
        for system in systems
        if system.rounds
    ]
    return _stacked_bars(rows, SOURCE_COLORS, "tokens committed per verify round", "{:.2f}", width_in)


def round_timeline(times: Sequence[RoundTimes], width_in: float = WIDTH_IN) -> str:
    """Bars of a round's phases in the order in which they happen."""
    rows = [(entry.system, entry.phases) for entry in times]
    return _stacked_bars(rows, PHASE_COLORS, "milliseconds", "{:.1f}", width_in)


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
    rows: Sequence[tuple[str, Mapping[str, float]]], colors: Mapping[str, str], label: str, number: str, width_in: float
) -> str:
    with drawing(ROW_IN * len(rows) + AXIS_IN, width_in) as (figure, axes):
        longest = max(sum(parts.values()) for _, parts in rows)
        for index, (_, parts) in enumerate(rows):
            left = 0.0
            for name, value in parts.items():
                axes.barh(
                    index, value, left=left, height=BAR_HEIGHT, color=colors[name], edgecolor=SURFACE, linewidth=1
                )
                if value * (width_in - NAMES_IN) > LABELLED_IN * longest:
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
