"""Tables of an evaluation: metrics by task, contrasts with their intervals, coverage, questions to look at."""

from collections.abc import Sequence
from typing import Any

import msgspec

from hyco_export.evaluate.page.evaluation import Contrast, Evaluation
from hyco_export.evaluate.page.rounds import address
from hyco_export.evaluate.page.tables import Cell, Column, Table, number, percent, spread, text

TASK, METRIC = Column("task", text=True), Column("metric", text=True)


def quality_table(evaluation: Evaluation) -> Table:
    """A row a task and metric, a column a system."""
    rows = evaluation.summary.quality
    systems = list(dict.fromkeys(row.system for row in rows))
    held = {(row.task, row.metric, row.system): row for row in rows}
    cells = []
    for task, metric in dict.fromkeys((row.task, row.metric) for row in rows):
        named: list[Cell] = [text(task), text(metric)]
        for system in systems:
            row = held.get((task, metric, system))
            noted = "" if row is None else _counted(row.count, row.run_sd)
            named.append(number(row.value if row else None, 2, noted))
        cells.append(tuple(named))
    columns = (TASK, METRIC, *(Column(system) for system in systems))
    return Table(
        "Quality by task; below a value the answers, and ± the deviation between generations", columns, tuple(cells)
    )


def _counted(count: int, run_sd: float | None) -> str:
    return f"{count:,}" + (f" ± {run_sd:.2f}" if run_sd is not None else "")


def contrasts_table(contrasts: Sequence[Contrast]) -> Table:
    """A row a contrast."""
    rows = []
    for row in contrasts:
        ends = "" if row.low is None or row.high is None else spread(row.low, row.high, 2, True)
        unit = f" {row.unit}" if row.unit else ""
        estimate = number(row.estimate, 2, ends, sign=True, unit=unit)
        flag = "exploratory" if row.exploratory else ""
        rows.append(
            (
                text(row.system),
                text(row.baseline),
                text(row.measure),
                text(row.task, flag),
                estimate,
                number(row.pairs, 0),
            )
        )
    columns = (
        Column("system", text=True),
        Column("against", text=True),
        Column("measure", text=True),
        TASK,
        Column("difference", "95 % interval"),
        Column("pairs", "questions"),
    )
    return Table("Paired contrasts", columns, tuple(rows))


def coverage_table(evaluation: Evaluation) -> Table:
    """Generations done of those planned, by system."""
    rows = (
        (text(system), number(done, 0), number(planned, 0), percent(done / planned if planned else None))
        for system, (done, planned) in evaluation.summary.coverage.items()
    )
    return Table(
        "Coverage", (Column("system", text=True), Column("done"), Column("planned"), Column("share")), tuple(rows)
    )


def failures_table(evaluation: Evaluation) -> Table:
    """Every generation that came to nothing."""
    rows = (
        (text(one.system), text(one.question), number(one.turn, 0), number(one.generation, 0), text(one.failure or ""))
        for one in evaluation.failures
    )
    columns = (
        Column("system", text=True),
        Column("question", text=True),
        Column("turn"),
        Column("generation"),
        Column("why", text=True),
    )
    return Table("Generations that failed", columns, tuple(rows))


def unsaved_table(evaluation: Evaluation) -> Table:
    """Questions that cost a system no less server time than the baseline, a row a generation."""
    found = evaluation.summary.questions_without_saving
    return rows_table(
        "Questions without a saving", [{"system": name, **row} for name, rows in found.items() for row in rows]
    )


def rows_table(caption: str, rows: Sequence[dict[str, Any]], source: str = "") -> Table:
    """A table of JSON objects, one column a field; a question leads to its rounds where the `source` has them."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    numeric = {name for name in names if all(isinstance(row.get(name), int | float | None) for row in rows)}
    columns = tuple(Column(name.replace("_", " "), text=name not in numeric) for name in names)
    cells = [[_cell(row.get(name)) for name in names] for row in rows]
    if source and {"system", "question"} <= set(names):
        place = names.index("question")
        for row, made in zip(rows, cells, strict=True):
            led = address(source, row["system"], row["question"])
            made[place] = msgspec.structs.replace(made[place], link=led)
    return Table(caption, columns, tuple(map(tuple, cells)))


def _cell(value: Any) -> Cell:
    if isinstance(value, list | tuple):
        return text(", ".join(map(str, value)))
    if isinstance(value, bool) or not isinstance(value, int | float):
        return text("" if value is None else value)
    return number(value, 0 if isinstance(value, int) else 2)
