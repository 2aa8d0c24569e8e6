"""The cost of low bit widths, layer by layer, as a table (CSV) and as a picture (SVG, a file of its own)."""

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ROW_IN, HEAD_IN = 0.21, 1.0  # a row of bars; titles and axis
WIDTH_IN = 10.0
FONT_PT = 9.0
BAR_COLOR, NEGATIVE_COLOR, INK, GRID = "#2f6f9f", "#b4552d", "#222222", "#d8d8d8"
VALUE_FORMAT = "{:.3g}"
LABEL_ROOM = 1.18  # of the longest bar, for the number behind it


class Panel(NamedTuple):
    """One column of horizontal bars: a value for each row, None where there is none."""

    title: str
    values: Sequence[float | None]


def write_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """One line a row under the keys of the first; floats in six significant digits.

    Raises:
        ValueError: no rows.
    """
    if not rows:
        raise ValueError("a table needs at least one row")
    with path.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.DictWriter(stream, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        for row in rows:
            writer.writerow({key: f"{value:.6g}" if isinstance(value, float) else value for key, value in row.items()})


def write_picture(path: Path, title: str, names: Sequence[str], panels: Sequence[Panel]) -> None:
    """Bars of every panel side by side, rows from top to bottom; equal figures give equal bytes."""
    import matplotlib
    from matplotlib.figure import Figure

    settings: dict[Any, Any] = {"svg.hashsalt": "hyco", "font.size": FONT_PT, "text.parse_math": False}
    with matplotlib.rc_context(settings):
        figure = Figure(figsize=(WIDTH_IN, HEAD_IN + ROW_IN * len(names)), layout="constrained", facecolor="white")
        figure.suptitle(title, x=0.01, ha="left", color=INK, fontsize=FONT_PT + 2)
        for axes, panel in zip(figure.subplots(1, len(panels), sharey=True, squeeze=False)[0], panels, strict=True):
            _draw(axes, names, panel)
        figure.savefig(path, format=path.suffix.removeprefix("."), metadata={"Date": None, "Creator": None})


def _draw(axes: "Axes", names: Sequence[str], panel: Panel) -> None:
    values = [0.0 if value is None else value for value in panel.values]
    rows = range(len(names))
    axes.barh(rows, values, height=0.72, color=[BAR_COLOR if value >= 0 else NEGATIVE_COLOR for value in values])
    for row, value in zip(rows, panel.values, strict=True):
        if value is not None:
            axes.annotate(
                VALUE_FORMAT.format(value),
                (max(value, 0.0), row),
                xytext=(3, 0),
                textcoords="offset points",
                va="center",
                fontsize=FONT_PT - 2,
                color=INK,
            )
    axes.set_title(panel.title, loc="left", fontsize=FONT_PT, color=INK)
    axes.set_yticks(rows, names)
    axes.set_ylim(len(names) - 0.5, -0.5)  # the first row on top
    axes.set_xlim(min(0.0, LABEL_ROOM * min(values)), LABEL_ROOM * max(*values, 0.0) or 1.0)
    axes.xaxis.set_major_locator(_few_ticks())
    axes.grid(axis="x", color=GRID, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(length=0, labelsize=FONT_PT - 1, labelcolor=INK)
    for side in ("top", "right", "left", "bottom"):
        axes.spines[side].set_visible(False)


def _few_ticks() -> Any:
    from matplotlib.ticker import MaxNLocator

    return MaxNLocator(nbins=4)
