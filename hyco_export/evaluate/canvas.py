"""A figure that becomes an inline <svg>: the page's font, and CSS variables for colours, so light and dark need one.

matplotlib draws in placeholder colours that stand for the page's variables. Knows no data.
"""

import io
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
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
def drawing(height_in: float) -> Iterator[tuple["Figure", "Axes"]]:
    """A figure of the page's width whose frame is reduced to the base line."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(SETTINGS):
        figure = Figure(figsize=(WIDTH_IN, height_in), layout="constrained")
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
