"""The picture of a bisection: SQNR of every tensor along the graph, an SVG for light and dark."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hyco_export.evaluate.charts import FAINT, INK, MUTED, SERIES, drawing, to_svg, write_picture
from hyco_export.workbench.bisect import LOW_DB, Divergence, TensorDivergence

if TYPE_CHECKING:
    from matplotlib.axes import Axes

HEIGHT_IN = 3.4
SHOWN_DB = 110.0  # equal tensors are drawn at the top
LAYER = re.compile(r"((?:step\d+\.)?layers\.\d+)\.")
MOST_LABELS = 12
DOT_SIZE = 7


def write_divergence(path: Path, divergence: Divergence) -> None:
    """Write it as an SVG file."""
    write_picture(path, divergence_picture(divergence))


def divergence_picture(divergence: Divergence) -> str:
    """Inline SVG: tensors from left to right in the graph's order; where they part is marked."""
    real = [tensor for tensor in divergence.tensors if tensor.sqnr_db is not None and not tensor.saturates]
    places = range(len(real))
    values = [min(SHOWN_DB, tensor.sqnr_db or 0.0) for tensor in real]
    with drawing(HEIGHT_IN) as (figure, axes):
        axes.plot(places, values, color=FAINT, linewidth=0.8, zorder=1)
        axes.scatter(places, values, s=DOT_SIZE, color=SERIES[0], zorder=2, linewidths=0)
        axes.axhline(LOW_DB, color=SERIES[1], linewidth=0.8, linestyle=(0, (4, 3)))
        ticks = _thinned(_layers(real))
        for start, _ in ticks:
            axes.axvline(start - 0.5, color=FAINT, linewidth=0.5, zorder=0)
        axes.set_xticks([start for start, _ in ticks], [name for _, name in ticks])
        axes.set_ylim(min(0.0, *values, LOW_DB) - 5, SHOWN_DB + 5)
        axes.set_xlim(-1, max(1, len(real)))
        axes.set_xlabel("layer")
        axes.set_ylabel("SQNR, dB")
        axes.tick_params(axis="y", labelcolor=MUTED)
        axes.grid(axis="y", color=FAINT, linewidth=0.5)
        title = f"{divergence.graph}: {divergence.candidate} against {divergence.reference}, {len(real)} tensors"
        axes.set_title(title, loc="left", color=MUTED, fontsize="medium")
        for mark in dict.fromkeys(name for name in (divergence.first, divergence.steepest) if name):
            _mark(axes, real, values, mark)
        return to_svg(figure)


def _mark(axes: "Axes", real: Sequence[TensorDivergence], values: Sequence[float], name: str) -> None:
    """A ring and the tensor's name, on the side that has room."""
    place = next((number for number, tensor in enumerate(real) if tensor.name == name), None)
    if place is None:
        return
    right = place > len(real) / 2
    axes.plot([place], [values[place]], "o", color=SERIES[1], markersize=7, fillstyle="none")
    axes.annotate(
        f"{name}: {real[place].sqnr_db:.1f} dB",
        (place, values[place]),
        (-8 if right else 8, -12),
        textcoords="offset points",
        ha="right" if right else "left",
        color=INK,
    )


def _layers(tensors: Sequence[TensorDivergence]) -> list[tuple[int, str]]:
    """Where each layer begins."""
    found: list[tuple[int, str]] = []
    for place, tensor in enumerate(tensors):
        match = LAYER.match(tensor.name)
        if match and match[1] not in {name for _, name in found}:
            found.append((place, match[1]))
    return found


def _thinned(ticks: Sequence[tuple[int, str]]) -> list[tuple[int, str]]:
    """Every n-th, short: `3`, or `step2 3` of the head."""
    step = -(-len(ticks) // MOST_LABELS)
    return [(place, name.replace("layers.", "").replace(".", "\n")) for place, name in ticks[::step]] if ticks else []
