"""What a page says of one source, section by section: figures, each a picture with the table of what it shows."""

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from hyco_export.errors import counted
from hyco_export.evaluate import pictures
from hyco_export.evaluate.charts import HALF_IN, css_colors
from hyco_export.evaluate.gates import Gate
from hyco_export.evaluate.link_costs import link_note
from hyco_export.evaluate.metrics import caveats, headline
from hyco_export.evaluate.page import plots
from hyco_export.evaluate.page.distributions import distributions, percentile_table
from hyco_export.evaluate.page.quality_tables import (
    contrasts_table,
    coverage_table,
    failures_table,
    quality_table,
    screen_table,
    unsaved_table,
)
from hyco_export.evaluate.page.rounds import address
from hyco_export.evaluate.page.sources import Evaluation, Source
from hyco_export.evaluate.page.tables import (
    Cell,
    Column,
    Compared,
    Table,
    acceptance_table,
    change,
    counts_table,
    pairs,
    percent,
    phases_table,
    sources_table,
    spread,
    systems_table,
    text,
)
from hyco_export.evaluate.quality.evaluation_folder import SERVER_TIME, Contrast


class Figure(msgspec.Struct, frozen=True):
    """A picture and the table of what it shows; a table alone where there is no picture."""

    title: str
    table: Table
    svg: str = ""
    legend: dict[str, str] = {}
    caption: str = ""
    open: bool = False  # is the table shown at once


class Section(msgspec.Struct, frozen=True):
    """A heading with its figures, side by side where there is room."""

    title: str
    figures: tuple[Figure, ...]
    lead: str = ""


class Part(msgspec.Struct, frozen=True):
    """One source: what a reader wants first, then sections."""

    name: str
    kind: str
    lead: str
    facts: tuple[tuple[str, str, str], ...]  # name, value, detail
    sections: tuple[Section, ...]
    conditions: Table
    notes: tuple[str, ...]
    recorded: tuple[tuple[str, str], ...]  # systems whose rounds can be looked at, and where


def part(compared: Compared) -> Part:
    """Everything of one source."""
    source = compared.source
    told = source.plan or (source.report or {})
    return Part(
        name=source.name,
        kind=source.kind,
        lead=_lead(source),
        facts=tuple(_facts(compared)),
        sections=tuple(section for section in _sections(compared) if section.figures),
        conditions=pairs("How it was measured", {name: value for name, value in told.items() if name != "prompts"}),
        notes=tuple(_notes(source)),
        recorded=tuple(
            (one.system, address(source.name, one.system)) for one in source.systems if one.system in source.traces
        ),
    )


def _lead(source: Source) -> str:
    """Machine, link, back end and server, as far as the folder says."""
    plan = source.plan
    link = plan.get("link")
    parts = [
        f"{counted(len(source.systems), 'system')}" if source.systems else "",
        f"{counted(source.systems[0].prompts, 'answer')} each" if source.systems else "",
        f"device back end {plan['backend']}" if plan.get("backend") else "",
        (f"times counted as over {link}" if link else "no modelled link") if "link" in plan else "",
        f"on {plan['machine']}" if plan.get("machine") else "",
        f"server {plan['server']}, clock {plan.get('clock', '')}" if plan.get("server") else "",
    ]
    return ", ".join(part for part in parts if part)


def _facts(compared: Compared) -> Iterator[tuple[str, str, str]]:
    """What a reader wants first."""
    source = compared.source
    asking = [system.system for system in source.systems if system.rounds]
    if source.report:
        verdict = str(source.report.get("verdict", ""))
        gates = source.report.get("gates", [])
        held = f"{sum(gate['passed'] for gate in gates)} of {counted(len(gates), 'gate')} hold"
        yield "verdict", verdict, held if gates else "no gate was judged"
    if not asking:
        return
    baseline = source.baseline
    best = next(system for system in source.systems if system.system == headline(asking))
    intervals = compared.intervals.get(best.system, {})
    mat, delivered = intervals.get("mat"), intervals.get("delivery_tokens_per_s")
    yield "tokens a round", f"{best.mat:.2f}", _detail(best.system, spread(mat.low, mat.high, 2) if mat else "")
    changed = compared.changes.get(best.system)
    if (share := change(best, baseline)) is not None:
        ends = spread(100 * changed.low, 100 * changed.high, 0, sign=True) if changed else ""
        detail = _detail(f"{best.system} against {baseline.system}", ends)
        yield "server time per token", percent(share, 0, sign=True).shown, detail
    ends = spread(delivered.low, delivered.high, 1) if delivered else ""
    yield "tokens per second", f"{best.delivery_tokens_per_s:.1f}", _detail(best.system, ends)
    if source.evaluation and source.evaluation.summary.coverage:
        done, planned = (sum(one[end] for one in source.evaluation.summary.coverage.values()) for end in (0, 1))
        yield "answers", f"{done:,} of {planned:,}", f"{counted(len(source.evaluation.failures), 'failure')}"
    elif source.rounds:
        yield "rounds recorded", f"{source.rounds:,}", "each can be looked at"


def _detail(name: str, interval: str) -> str:
    return f"{name}; 95 %: {interval}" if interval else name


def _sections(compared: Compared) -> Iterator[Section]:
    source = compared.source
    if source.report:
        yield Section("Gates", tuple(_gates(source.report)), "What the recipe demands of a run.")
    if not source.systems:
        return
    yield Section("Systems", tuple(_systems(compared)))
    if source.evaluation:
        yield Section("Quality of the answers", tuple(_quality(source, source.evaluation)))
    yield Section(
        "Distributions", tuple(_distributions(source)),
        "Calls that an outage disturbed are left out. A row is scaled to its own peak; the line goes from p10 to p90, "
        "the dot is the median; the last bin holds the tail.",
    )  # fmt: skip
    yield Section("Acceptance", tuple(_acceptance(source)))


def _gates(report: dict[str, Any]) -> Iterator[Figure]:
    gates = [(msgspec.convert(gate, Gate), gate["passed"]) for gate in _with_nan(report.get("gates", []))]
    if not gates:
        return
    rows = tuple(
        (
            text(gate.name),
            Cell(gate.value_text, gate.value),
            text(gate.limit_text),
            Cell("✓" if good else "✗", good, good=good),
        )
        for gate, good in gates
    )
    columns = (Column("what must hold", text=True), Column("value"), Column("limit", text=True), Column("holds"))
    table = Table(f"All {counted(len(gates), 'gate')}", columns, rows)
    yield Figure("", table, open=not all(good for _, good in gates))


def _with_nan(gates: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """JSON has null for a value that was not measured."""
    return [{**gate, "value": float("nan")} if gate["value"] is None else gate for gate in gates]


def _systems(compared: Compared) -> Iterator[Figure]:
    yield Figure("", systems_table(compared), open=True)
    yield Figure("", counts_table(compared.source))
    points = plots.trade_off_points(compared)
    if len(points) > 1:
        alone = [system for system in compared.source.systems if not system.rounds]
        told = "".join(f" {one.system} asks no server and delivers {one.delivery_tokens_per_s:.1f}." for one in alone)
        yield Figure(
            "Server time against delivery",
            _trade_off_table(points),
            plots.trade_off(points),
            caption="Lines are 95 % intervals over prompts. Grey: another system is at least as good in both. Hollow: "
            f"commits tokens that no verifier chose.{told}",
        )
    asking = [system for system in compared.source.systems if system.rounds]
    if asking:
        yield Figure(
            "Who proposed the tokens", sources_table(asking), pictures.tokens_by_source(asking, HALF_IN),
            css_colors(pictures.SOURCE_COLORS), "Tokens committed by a verify round: the length of a bar is MAT.",
        )  # fmt: skip


def _trade_off_table(points: Sequence[plots.Point]) -> Table:
    columns = (
        Column("system", text=True), Column("server time", "ms per token"), Column("delivered", "tokens per s"),
        Column("", text=True),
    )  # fmt: skip
    rows = tuple(
        (
            text(point.name),
            Cell(f"{point.server_ms:.2f}", point.server_ms),
            Cell(f"{point.delivered:.1f}", point.delivered),
            text("dominated" if point.dominated else ""),
        )
        for point in points
    )
    return Table("Server time and delivery", columns, rows)


def _quality(source: Source, evaluation: Evaluation) -> Iterator[Figure]:
    summary = evaluation.summary
    if summary.quality:
        yield Figure("", quality_table(evaluation), open=True)
    measures: dict[tuple[str, str], list[Contrast]] = {}
    for contrast in summary.contrasts:
        measures.setdefault((contrast.measure, contrast.baseline), []).append(contrast)
    for (measure, baseline), found in sorted(measures.items(), key=lambda item: -len(item[1])):  # tall beside tall
        title = f"{'Server time per token' if measure == SERVER_TIME else measure} against {baseline}"
        caption = "95 % intervals, paired by question. Grey: exploratory."
        yield Figure(title, contrasts_table(found), plots.contrast_picture(found), caption=caption)
    if summary.coverage:
        yield Figure("Coverage", coverage_table(evaluation), open=True)
    if evaluation.failures:
        yield Figure("Failures", failures_table(evaluation), open=True)
    if summary.screen:
        yield Figure("", screen_table(evaluation, source.name))
    if summary.questions_without_saving:
        yield Figure("", unsaved_table(evaluation))


def _distributions(source: Source) -> Iterator[Figure]:
    for one in distributions(source):
        title = f"{one.measure.name}, {one.measure.unit}"
        yield Figure(title[0].upper() + title[1:], percentile_table(one), plots.ridges(one))


def _acceptance(source: Source) -> Iterator[Figure]:
    drafting = [system for system in source.systems if system.chain_acceptance]
    if drafting:
        assumed = _assumed(source)
        dashed = f" Dashed: the {assumed:.2f} that scoring assumes." if assumed is not None else ""
        yield Figure(
            "The head's chain by depth",
            acceptance_table(drafting),
            pictures.acceptance_by_depth(drafting, assumed, HALF_IN),
            caption=f"Share of rounds that took the chain's token, of those that took all above it.{dashed}",
        )
    times = [pictures.median_times(name, source.traces[name]) for name in source.traces]
    known = [one for one in times if one is not None]
    if known:
        yield Figure(
            "Where a round's time goes", phases_table(known), pictures.round_timeline(known, HALF_IN),
            css_colors(pictures.PHASE_COLORS), "Medians of undisturbed rounds, as they were measured.",
        )  # fmt: skip


def _assumed(source: Source) -> float | None:
    held = (source.report or {}).get("chain_acceptance") or source.plan.get("drafting", {}).get("chain_acceptance")
    return float(held) if held is not None else None


def _notes(source: Source) -> Iterator[str]:
    yield from source.notes
    if source.report:
        yield from source.report.get("notes", ())
        if source.report.get("reason"):
            yield f"{source.report['reason']}; next: {source.report.get('next', '')}"
    elif source.systems:
        yield from caveats(source.systems)
        if source.rounds:
            yield link_note(source.traces.values())
