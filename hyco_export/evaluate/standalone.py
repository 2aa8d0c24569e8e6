"""A picture of the report as a file of its own: an SVG that brings the page's colours and font, light and dark.

Knows the variables of `evaluate.canvas`; draws nothing.
"""

from pathlib import Path

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
    """Write an inline <svg> of `canvas.to_svg` as a file that a browser shows alone."""
    opening, rest = inline.split(">", 1)
    style = (
        f"<style>svg {{ {_variables(LIGHT)} --font: {FONT}; background: var(--surface); }} "
        f"@media (prefers-color-scheme: dark) {{ svg {{ {_variables(DARK)} }} }}</style>"
    )
    path.write_text(f"{opening}>{style}{rest}", encoding="utf-8")


def _variables(colors: dict[str, str]) -> str:
    return " ".join(f"--{name}: {color};" for name, color in colors.items())
