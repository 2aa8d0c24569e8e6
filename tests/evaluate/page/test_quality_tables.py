"""Tables of an evaluation."""

from hyco_export.evaluate.page.evaluation import Contrast
from hyco_export.evaluate.page.quality_tables import (
    contrasts_table,
    coverage_table,
    failures_table,
    quality_table,
    rows_table,
    unsaved_table,
)
from hyco_export.evaluate.page.sources import Source


def test_metrics_stand_by_task_and_system(evaluation: Source) -> None:
    assert evaluation.evaluation is not None
    table = quality_table(evaluation.evaluation)
    assert [column.label for column in table.columns] == ["task", "metric", "cloud-mtp", "hyco"]
    ((task, metric, baseline, hyco),) = table.rows
    assert (task.shown, metric.shown, baseline.value, hyco.value) == ("qa", "judge", 90.6, 90.34)
    assert (baseline.note, hyco.note) == ("4 ± 0.61", "4")


def test_contrasts_have_their_interval_and_unit() -> None:
    rows = (Contrast("cloud-mtp", "hyco", "g", estimate=-38.6, low=-39.5, high=-37.7, pairs=480, unit="%"),)
    rows += (Contrast("cloud-mtp", "hyco", "judge", task="qa", exploratory=True),)
    first, second = contrasts_table(rows).rows
    assert (first[4].shown, first[4].note, first[4].value) == ("−38.60 %", "−39.50 … −37.70", -38.6)  # noqa: RUF001
    assert second[3].note == "exploratory" and second[4].value is None and second[4].note == ""


def test_coverage_and_failures_are_counted(evaluation: Source) -> None:
    assert evaluation.evaluation is not None
    assert [row[3].shown for row in coverage_table(evaluation.evaluation).rows] == ["100.0 %", "80.0 %"]
    assert [row[1].shown for row in failures_table(evaluation.evaluation).rows] == ["q9"]
    assert [cell.shown for cell in unsaved_table(evaluation.evaluation).rows[0]] == ["hyco", "0", "1", "4", "q2"]


def test_a_question_leads_to_its_rounds() -> None:
    rows = [{"system": "hyco", "question": "81/turn2", "difference": -25.0}]
    (row,) = rows_table("Screen", rows, "an evaluation").rows
    assert row[1].link == "#rounds/an%20evaluation/hyco/81%2Fturn2"
    assert row[2].value == -25.0 and not rows_table("Screen", rows).rows[0][1].link
