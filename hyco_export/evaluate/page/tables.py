"""Tables of a page: what is shown of a value, and the value itself, by which a reader sorts."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

NOT_MEASURED = "\N{EN DASH}"
MINUS = "\N{MINUS SIGN}"


class Column(msgspec.Struct, frozen=True):
    """`unit` stands below the label; `text` columns are aligned to the left; `means` is shown on hovering."""

    label: str
    unit: str = ""
    text: bool = False
    means: str = ""


class Cell(msgspec.Struct, frozen=True):
    """`value` is what the cell is sorted by, unrounded; `note` stands below it, smaller; `link` is an address."""

    shown: str
    value: float | str | None = None
    note: str = ""
    good: bool | None = None
    link: str = ""


class Table(msgspec.Struct, frozen=True):
    """Rows under columns; the first cell of a row names it."""

    caption: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]


def number(value: float | None, digits: int = 2, note: str = "", sign: bool = False, unit: str = "") -> Cell:
    """A number with thousands separated; a dash where nothing was measured."""
    if value is None or math.isnan(value):
        return Cell(NOT_MEASURED, None, note)
    shown = f"{value:{'+' if sign else ''},.{digits}f}".replace("-", MINUS)
    return Cell(shown + unit, float(value), note)


def percent(share: float | None, digits: int = 1, note: str = "", sign: bool = False) -> Cell:
    """A share in percent; `value` stays the share."""
    if share is None or math.isnan(share):
        return Cell(NOT_MEASURED, None, note)
    return msgspec.structs.replace(number(100 * share, digits, note, sign, " %"), value=float(share))


def text(shown: Any, note: str = "") -> Cell:
    """A word, sorted by itself."""
    return Cell(str(shown), str(shown), note)


def spread(low: float, high: float, digits: int, sign: bool = False) -> str:
    """An interval below its estimate."""
    ends = (f"{end:{'+' if sign else ''},.{digits}f}".replace("-", MINUS) for end in (low, high))
    return " … ".join(ends)


def pairs(caption: str, values: Mapping[str, Any], label: str = "condition") -> Table:
    """A table of names and values; lists are joined, nested maps become `outer.inner`."""
    rows = tuple((text(name.replace("_", " ")), text(_said(value))) for name, value in flat(values))
    return Table(caption, (Column(label, text=True), Column("value", text=True)), rows)


def flat(values: Mapping[str, Any], above: str = "") -> Iterable[tuple[str, Any]]:
    """Names and plain values of nested maps."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{above}{name}.")
        else:
            yield above + name, value


def _said(value: Any) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(map(_said, value))
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: NOT_MEASURED}[value]
    return f"{value:,g}" if isinstance(value, float) else str(value)
