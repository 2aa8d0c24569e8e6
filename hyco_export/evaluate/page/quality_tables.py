"""Tables of an evaluation: metrics by task, contrasts with their intervals, coverage, questions to look at."""

from collections.abc import Sequence

import msgspec

from hyco_export.evaluate.page.rounds import address
from hyco_export.evaluate.page.sources import Evaluation
from hyco_export.evaluate.page.tables import SYSTEM, Cell, Column, Table, number, percent, spread, text
from hyco_export.evaluate.quality.evaluation_folder import SERVER_TIME, Contrast

TASK, METRIC, QUESTION = Column("task", text=True), Column("metric", text=True), Column("question", text=True)


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
    """A row a contrast; of `g` in percent."""
    columns = (
        SYSTEM,
        Column("against", text=True),
        Column("measure", text=True),
        TASK,
        Column("difference", "95 % interval"),
        Column("pairs", "questions"),
    )
    rows = tuple(
        (
            text(row.system),
            text(row.baseline),
            text(row.measure),
            text(row.task, "exploratory" if row.exploratory else ""),
            _estimate(row),
            number(row.pairs, 0),
        )
        for row in contrasts
    )
    return Table("Paired contrasts", columns, rows)


def _estimate(row: Contrast) -> Cell:
    if row.measure == SERVER_TIME:
        return percent(row.estimate, 1, spread(100 * row.low, 100 * row.high, 1, sign=True), sign=True)
    return number(row.estimate, 2, spread(row.low, row.high, 2, sign=True), sign=True)


def coverage_table(evaluation: Evaluation) -> Table:
    """Generations done of those planned, by system."""
    rows = (
        (text(system), number(done, 0), number(planned, 0), percent(done / planned if planned else None))
        for system, (done, planned) in evaluation.summary.coverage.items()
    )
    return Table("Coverage", (SYSTEM, Column("done"), Column("planned"), Column("share")), tuple(rows))


def failures_table(evaluation: Evaluation) -> Table:
    """Every generation that came to nothing."""
    rows = (
        (text(one.system), text(one.question), number(one.turn, 0), number(one.generation, 0), text(one.failure or ""))
        for one in evaluation.failures
    )
    columns = (SYSTEM, QUESTION, Column("turn"), Column("generation"), Column("why", text=True))
    return Table("Generations that failed", columns, tuple(rows))


def unsaved_table(evaluation: Evaluation) -> Table:
    """Questions that cost a system no less server time than the baseline, a row a generation."""
    rows = (
        (
            text(system),
            number(one.generation, 0),
            number(one.count, 0),
            number(one.pairs, 0),
            percent(one.share),
            text(", ".join(one.questions)),
        )
        for system, generations in evaluation.summary.questions_without_saving.items()
        for one in generations
    )
    counts = (Column("generation"), Column("without", "questions"), Column("of", "questions"), Column("share"))
    return Table("Questions without a saving", (SYSTEM, *counts, Column("which", text=True)), tuple(rows))


def screen_table(evaluation: Evaluation, source: str) -> Table:
    """Answers that were judged far from the baseline's, each with the way to its rounds in `source`."""
    rows = (
        (
            text(one.system),
            msgspec.structs.replace(text(one.question), link=address(source, one.system, one.question)),
            text(one.task),
            number(one.difference, 1, f"{_listed(one.scores)} against {_listed(one.baseline_scores)}", sign=True),
        )
        for one in evaluation.summary.screen
    )
    columns = (SYSTEM, QUESTION, TASK, Column("difference", "judge's points"))
    return Table("Answers to read: judged far from the baseline's", columns, tuple(rows))


def _listed(scores: Sequence[float]) -> str:
    return ", ".join(f"{score:g}" for score in scores)
