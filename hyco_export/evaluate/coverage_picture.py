"""The keep set's picture: share of the text's tokens that a keep set of each size holds.

Knows the rows of `core.coverage.curve`; counts nothing.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from hyco_export.evaluate.canvas import FAINT, INK, MUTED, SERIES, drawing, to_svg

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
