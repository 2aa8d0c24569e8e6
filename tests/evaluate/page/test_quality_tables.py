"""Tables of an evaluation."""

from hyco_export.evaluate.page.quality_tables import (
    contrasts_table,
    coverage_table,
    failures_table,
    quality_table,
    screen_table,
    unsaved_table,
)
from hyco_export.evaluate.page.sources import Source
from hyco_export.evaluate.quality.evaluation_folder import Contrast


def test_metrics_stand_by_task_and_system(evaluation: Source) -> None:
    assert evaluation.evaluation is not None
    table = quality_table(evaluation.evaluation)
    assert [column.label for column in table.columns] == ["task", "metric", "cloud-mtp", "hyco"]
    ((task, metric, baseline, hyco),) = table.rows
    assert (task.shown, metric.shown, baseline.value, hyco.value) == ("qa", "judge", 90.6, 90.34)
    assert (baseline.note, hyco.note) == ("4 ± 0.61", "4")


def test_g_is_a_change_in_percent_and_a_metric_a_difference() -> None:
    rows = (Contrast("cloud-mtp", "hyco", "g", "all", -0.386, -0.395, -0.377, 480, False),)
    rows += (Contrast("cloud-mtp", "hyco", "judge", "qa", -0.26, -1.2, 0.8, 40, True),)
    first, second = contrasts_table(rows).rows
    assert (first[4].shown, first[4].note, first[4].value) == ("−38.6 %", "−39.5 … −37.7", -0.386)  # noqa: RUF001
    assert (second[4].shown, second[4].note) == ("−0.26", "−1.20 … +0.80")  # noqa: RUF001
    assert second[3].note == "exploratory" and second[4].value == -0.26


def test_coverage_and_failures_are_counted(evaluation: Source) -> None:
    assert evaluation.evaluation is not None
    assert [row[3].shown for row in coverage_table(evaluation.evaluation).rows] == ["100.0 %", "80.0 %"]
    assert [row[1].shown for row in failures_table(evaluation.evaluation).rows] == ["q9"]
    assert evaluation.evaluation.failures[0].failure == "went away"
    assert [cell.shown for cell in unsaved_table(evaluation.evaluation).rows[0]] == [
        "hyco",
        "0",
        "1",
        "4",
        "25.0 %",
        "q2",
    ]


def test_a_question_leads_to_its_rounds(evaluation: Source) -> None:
    assert evaluation.evaluation is not None
    (row,) = screen_table(evaluation.evaluation, "an evaluation").rows
    assert row[1].link == "#rounds/an%20evaluation/hyco/q1"
    assert row[3].value == -25.0 and row[3].note == "65 against 90"
