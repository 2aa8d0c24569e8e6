"""Tables of a page: what is shown of a value, and the value by which a reader sorts; and those of systems side by side:
figures with intervals, acceptance by depth, who proposed the tokens, phases."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from hyco_export.evaluate.metrics import BONUS, DRAW, SOURCE_NAMES, THRESHOLD, SystemMetrics
from hyco_export.evaluate.page.intervals import Interval, change_interval, prompt_sums, ratio_intervals
from hyco_export.evaluate.page.sources import Source
from hyco_export.evaluate.pictures import RoundTimes
from hyco_export.evaluate.quality.evaluation_folder import ALL_TASKS, SERVER_TIME

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


SYSTEM = Column("system", text=True)
MEASURES = (
    Column("MAT", "tokens a round", means="mean tokens committed by a verify round"),
    Column("server time", "ms per token", means="g: prompts, verify rounds and the server's head, per output token"),
    Column("against first", "server time", means="relative change of the server time per token"),
    Column("delivered", "tokens per s"),
    Column("draft time", "ms per token", means="the device's passes and scoring, per output token"),
    Column("TTFT", "ms, mean", means="time to first token"),
)
DETAILS = (
    Column("up", "B a round"),
    Column("down", "B a round"),
    Column("bonus outside keep set", "of bonus tokens"),
    Column("answers"),
    Column("rounds"),
    Column("tokens"),
)


class Compared(msgspec.Struct, frozen=True):
    """A source's systems with the intervals of their figures.

    Attributes:
        intervals: by system and measure of `SystemMetrics`.
        changes: of the server's time per token against the baseline, by system.
    """

    source: Source
    intervals: Mapping[str, Mapping[str, Interval]]
    changes: Mapping[str, Interval]


def compare(source: Source) -> Compared:
    """Bootstrap a source's figures over its prompts; the intervals of an evaluation's own contrasts are taken over."""
    sums = {system: prompt_sums(traces) for system, traces in source.traces.items()}
    changes = {}
    if source.systems and source.baseline.system in sums:
        baseline = source.baseline.system
        found = {system: change_interval(of, sums[baseline]) for system, of in sums.items() if system != baseline}
        changes = {system: interval for system, interval in found.items() if interval is not None}
    for contrast in source.evaluation.summary.contrasts if source.evaluation else ():
        told = contrast.baseline == source.baseline.system, contrast.measure, contrast.task
        if told == (True, SERVER_TIME, ALL_TASKS):
            changes[contrast.system] = Interval(contrast.low, contrast.high)
    return Compared(source, {system: ratio_intervals(of) for system, of in sums.items()}, changes)


def change(system: SystemMetrics, baseline: SystemMetrics) -> float | None:
    """Relative change of the server's time per token; None for the baseline, and without a server."""
    if system.system == baseline.system or not system.rounds or not baseline.server_ms_per_token:
        return None
    return system.server_ms_per_token / baseline.server_ms_per_token - 1


def systems_table(compared: Compared) -> Table:
    """One row a system."""
    source = compared.source
    rows = ((_name(system), *_measures(system, compared)) for system in source.systems)
    caption = f"Systems of {source.name}; below a figure its 95 % interval over prompts"
    return Table(caption, (SYSTEM, *MEASURES), tuple(rows))


def counts_table(source: Source) -> Table:
    """Bytes, the keep set, and how much was measured."""
    rows = ((_name(system), *_details(system, source.keepset_known)) for system in source.systems)
    return Table("Bytes a round (bodies, means), keep set, and how much was measured", (SYSTEM, *DETAILS), tuple(rows))


def overview_table(found: Sequence[Compared]) -> Table:
    """All systems of all sources."""
    rows = (
        (text(compared.source.name), _name(system), *_measures(system, compared))
        for compared in found
        for system in compared.source.systems
    )
    return Table("All systems of all folders", (Column("folder", text=True), SYSTEM, *MEASURES), tuple(rows))


def _name(system: SystemMetrics) -> Cell:
    unverified = f"{100 * system.unverified_share:.0f} % unverified" if system.unverified_tokens else ""
    return text(system.system, unverified)


def _measures(system: SystemMetrics, compared: Compared) -> tuple[Cell, ...]:
    intervals = compared.intervals.get(system.system, {})

    def note(name: str, digits: int) -> str:
        found = intervals.get(name)
        return spread(found.low, found.high, digits) if found and system.rounds else ""

    changed = compared.changes.get(system.system)
    of_change = spread(100 * changed.low, 100 * changed.high, 1, sign=True) if changed and system.rounds else ""
    shown = change(system, compared.source.baseline)
    return (
        number(system.mat, 2, note("mat", 2)),
        number(system.server_ms_per_token if system.rounds else None, 2, note("server_ms_per_token", 2)),
        percent(shown, 1, of_change if shown is not None else "", sign=True),
        number(system.delivery_tokens_per_s, 1, note("delivery_tokens_per_s", 1)),
        number(system.draft_ms_per_token, 2, note("draft_ms_per_token", 2)),
        number(system.first_token_ms, 0),
    )


def _details(system: SystemMetrics, keepset_known: bool) -> tuple[Cell, ...]:
    asked = bool(system.rounds)
    return (
        number(system.bytes_up.payload_mean if asked else None, 0),
        number(system.bytes_down.payload_mean if asked else None, 0),
        percent(system.bonus_miss_share if asked and keepset_known else None),
        number(system.prompts, 0),
        number(system.rounds, 0),
        number(system.output_tokens, 0),
    )


def acceptance_table(systems: Sequence[SystemMetrics]) -> Table:
    """Of the chain: the share taken at every depth, and the counts below it."""
    depths = sorted({step.depth for system in systems for step in system.chain_acceptance})
    rows = []
    for system in systems:
        steps = {step.depth: step for step in system.chain_acceptance}
        cells = [
            percent(steps[depth].share, 1, f"{steps[depth].accepted:,} of {steps[depth].trials:,}")
            if depth in steps
            else number(None)
            for depth in depths
        ]
        whole = float(np.prod([step.share for step in system.chain_acceptance]))
        rows.append((text(system.system), *cells, percent(whole)))
    columns = (SYSTEM, *(Column(f"depth {depth}", "of those that took the chain so far") for depth in depths))
    return Table("Acceptance of the head's chain by depth", (*columns, Column("all of it", "product")), tuple(rows))


def sources_table(systems: Sequence[SystemMetrics]) -> Table:
    """Tokens a round by who proposed them, and by what took them."""
    asking = [system for system in systems if system.rounds]
    names, rules = (*SOURCE_NAMES.values(), BONUS), (DRAW, THRESHOLD)
    rows = (
        (
            text(system.system),
            *(
                number(system.tokens_by_source[name] / system.rounds, 2, f"{system.tokens_by_source[name]:,}")
                for name in names
            ),
            *(
                number(system.tokens_by_rule[rule] / system.rounds, 2, f"{system.tokens_by_rule[rule]:,}")
                for rule in rules
            ),
        )
        for system in asking
    )
    columns = (SYSTEM, *(Column(_SOURCE_WORDS.get(name, name), "a round") for name in names))
    took = (Column("taken by draw", "a round"), Column("by threshold alone", "a round"))
    return Table("Tokens committed a verify round, by who proposed and what took them", (*columns, *took), tuple(rows))


_SOURCE_WORDS = {"chain": "head's chain", "slm": "SLM", BONUS: "bonus"}


def phases_table(times: Sequence[RoundTimes]) -> Table:
    """Medians of a round's phases."""
    words = {"head": "head", "slm": "SLM", "transfer": "network, queue", "commit": "ring commit"}
    names = tuple(times[0].phases)
    rows = ((text(row.system), *(number(row.phases[name], 2) for name in names)) for row in times)
    columns = (SYSTEM, *(Column(words.get(name, name), "ms, median") for name in names))
    return Table("Phases of a round", columns, tuple(rows))
