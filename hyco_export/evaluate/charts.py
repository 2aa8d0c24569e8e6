"""Figures as SVG: inline in the report or as files of their own, in light and dark.

matplotlib draws in placeholder colours, which become the page's CSS variables, so that one SVG serves both schemes.
"""

import io
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, MUTED, FAINT, SURFACE = "#010101", "#020202", "#030303", "#040404"
SERIES = ("#0a0101", "#0a0102", "#0a0103", "#0a0104", "#0a0105")
CSS_VARIABLES = {
    INK: "var(--ink)",
    MUTED: "var(--muted)",
    FAINT: "var(--faint)",
    SURFACE: "var(--surface)",
    **{color: f"var(--series-{number})" for number, color in enumerate(SERIES, 1)},
}

WIDTH_IN = 7.2  # every picture has the width of the page's column, so text has one size
HALF_IN = 3.9  # of one that stands beside another, or alone on a phone
FONT_PT = 9.0
SETTINGS: dict[Any, Any] = {
    "svg.fonttype": "none",  # text stays text: selectable, and in the page's font
    "svg.hashsalt": "hyco",  # ids do not change from run to run
    "font.size": FONT_PT,
    "text.parse_math": False,  # a token may hold a dollar sign
    "axes.linewidth": 0.8,
    "text.color": INK,
    "axes.edgecolor": FAINT,
    "axes.labelcolor": MUTED,
    "xtick.color": MUTED,
    "ytick.color": INK,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
}


@contextmanager
def drawing(height_in: float, width_in: float = WIDTH_IN) -> Iterator[tuple["Figure", "Axes"]]:
    """A figure of the page's width (or half of it) whose frame is reduced to the base line."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(SETTINGS):
        figure = Figure(figsize=(width_in, height_in), layout="constrained")
        axes = figure.add_subplot()
        for side in ("top", "right", "left"):
            axes.spines[side].set_visible(False)
        yield figure, axes


def to_svg(figure: "Figure") -> str:
    """The <svg> element alone, without a size of its own."""
    buffer = io.StringIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font")  # the reader's browser has the letter
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    opening, rest = text.split(">", 1)
    text = re.sub(r' (width|height)="[^"]*"', "", opening) + ">" + rest
    text = re.sub(r"'DejaVu Sans'[^;\"]*", "var(--font)", text)
    for placeholder, variable in CSS_VARIABLES.items():
        text = text.replace(placeholder, variable)
    return text


def css_colors(colors: Mapping[str, str]) -> dict[str, str]:
    """Name -> the page's variable, for a legend."""
    return {name: CSS_VARIABLES[color] for name, color in colors.items()}


LIGHT = {
    "surface": "#fcfbf9",
    "ink": "#23272e",
    "muted": "#646b75",
    "faint": "#d5d1c9",
    "series-1": "#31639c",
    "series-2": "#c27c1e",
    "series-3": "#3d8268",
    "series-4": "#8a6a9f",
    "series-5": "#a3626b",
}
DARK = {
    "surface": "#16181c",
    "ink": "#e4e2dd",
    "muted": "#9aa0a8",
    "faint": "#454a53",
    "series-1": "#86aedb",
    "series-2": "#dfa858",
    "series-3": "#7fc0a2",
    "series-4": "#bda0d1",
    "series-5": "#d49ba3",
}
FONT = '"Inter", "Segoe UI", "Helvetica Neue", "Noto Sans", system-ui, sans-serif'


def write_picture(path: Path, inline: str) -> None:
    """Write an inline <svg> of `to_svg` as a file that a browser shows alone."""
    path.write_text(standalone(inline), encoding="utf-8")


def standalone(inline: str) -> str:
    """An inline <svg> of `to_svg` with colours and font of its own: for a file, or a notebook."""
    opening, rest = inline.split(">", 1)
    style = (
        f"<style>svg {{ {_variables(LIGHT)} --font: {FONT}; background: var(--surface); }} "
        f"@media (prefers-color-scheme: dark) {{ svg {{ {_variables(DARK)} }} }}</style>"
    )
    return f"{opening}>{style}{rest}"


def _variables(colors: dict[str, str]) -> str:
    return " ".join(f"--{name}: {color};" for name, color in colors.items())


HEIGHT_IN = 3.0
LOWEST_SHOWN = 0.5  # the fixed part may start far below: what matters is near 1
SERIES_NAMES = (("held_out_share", "held out"), ("counted_share", "counted"))
LINE_WIDTH = 1.8
CROWDED_SHARE = 0.5  # of the vocabulary: beyond it a label has no room before the right edge


def coverage_picture(rows: Sequence[Mapping[str, Any]], chosen: int) -> str:
    """Inline SVG: the shares over the size, which has a logarithmic axis; the chosen size is marked.

    Without held-out text only the counted tokens are shown.
    """
    sizes = [row["size"] for row in rows]
    shown = [(key, name) for key, name in SERIES_NAMES if rows[-1][key] > 0] or SERIES_NAMES[-1:]
    share = next(row[shown[0][0]] for row in rows if row["size"] == chosen)
    crowded = chosen > sizes[-1] * CROWDED_SHARE
    lowest = min(LOWEST_SHOWN, max(0.0, share - 0.1))
    with drawing(HEIGHT_IN) as (figure, axes):
        for color, (key, name) in zip(SERIES, shown, strict=False):
            axes.plot(sizes, [row[key] for row in rows], color=color, linewidth=LINE_WIDTH, label=name)
        axes.axvline(chosen, color=FAINT, linewidth=1)
        axes.plot([chosen], [share], "o", color=SERIES[0], markersize=5, clip_on=False)
        axes.annotate(
            f"{chosen:,} tokens: {100 * share:.2f} %",
            (chosen, lowest),  # at the axis: the curves are above it
            (-6 if crowded else 6, 6),
            textcoords="offset points",
            ha="right" if crowded else "left",
            color=INK,
        )
        axes.set_xscale("log")
        axes.set_xticks(_ticks(sizes[0], sizes[-1]), [f"{tick:,}" for tick in _ticks(sizes[0], sizes[-1])])
        axes.minorticks_off()
        axes.set_xlim(sizes[0], sizes[-1])
        axes.set_ylim(lowest, 1.0 + 0.03 * (1.0 - lowest))
        axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.0f} %")
        axes.tick_params(axis="y", labelcolor=MUTED)
        axes.set_xlabel("kept tokens")
        axes.set_title("tokens of the assistant turns inside the keep set", loc="left", color=MUTED, fontsize="medium")
        axes.grid(axis="y", color=FAINT, linewidth=0.5)
        axes.legend(frameon=False, loc="upper left")
        return to_svg(figure)


def _ticks(first: int, last: int) -> list[int]:
    """Powers of two inside the axis, every second one from the top, and the vocabulary's size at its end."""
    ticks, tick = [last], last // 2
    while tick >= first:
        ticks.append(tick)
        tick //= 2
    return ticks[::-1][len(ticks) % 2 == 0 :: 2]
