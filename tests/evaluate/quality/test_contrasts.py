"""Contrasts, run SD, questions without saving and the screen, on answers whose figures are known by hand."""

import numpy as np
import pytest

from hyco_export.evaluate.quality.contrasts import (
    ScoredAnswers,
    contrasts,
    qualities,
    questions_without_saving,
    screen,
)
from hyco_export.evaluate.quality.evaluation_folder import Answer, Contrast, NoSaving
from hyco_export.evaluate.quality.statistics import mean_difference
from tests.support.evaluations import BASELINE, OTHER, SYSTEM, answer, score

SYSTEMS = (BASELINE, SYSTEM)


def find(rows: list[Contrast], measure: str, task: str = "all") -> Contrast:
    (found,) = [row for row in rows if row.measure == measure and row.task == task]
    return found


def test_g_pools_sums_and_puts_both_turns_of_a_question_together() -> None:
    answers = [
        answer(BASELINE, "9", "mt-bench", 1, tokens=10, server_ms=100.0),
        answer(BASELINE, "9", "mt-bench", 2, tokens=30, server_ms=200.0),
        answer(BASELINE, "10", "rag", tokens=60, server_ms=300.0),
        answer(SYSTEM, "9", "mt-bench", 1, tokens=20, server_ms=100.0),
        answer(SYSTEM, "9", "mt-bench", 2, tokens=20, server_ms=50.0),
        answer(SYSTEM, "10", "rag", tokens=10, server_ms=80.0),
    ]
    found = find(contrasts(ScoredAnswers(answers, []), SYSTEMS, BASELINE), "g")
    assert found.estimate == pytest.approx((230 / 50) / (600 / 100) - 1)
    assert (found.pairs, found.exploratory, found.run_sd) == (2, False, None)
    # a draw takes "10" twice, "9" twice, or both: the ends are the two questions' own changes
    assert found.low == pytest.approx(150 / 40 / (300 / 40) - 1)
    assert found.high == pytest.approx(80 / 10 / (300 / 60) - 1)


def test_a_question_counts_only_with_all_turns_and_all_generations() -> None:
    answers = [answer(name, question) for name in SYSTEMS for question in "abc"]
    answers += [answer(SYSTEM, question, generation=1) for question in "ab"]
    answers += [answer(SYSTEM, "c", generation=1, text="", failure="cut off after 10 tokens")]
    answers += [answer(BASELINE, "a", turn=2), answer(BASELINE, "d")]
    for name in SYSTEMS:
        answers += [answer(name, "e"), answer(name, "f")]
    answers += [answer(SYSTEM, "e", generation=1), answer(SYSTEM, "f", generation=1)]
    found = find(contrasts(ScoredAnswers(answers, []), SYSTEMS, BASELINE), "g")
    assert found.pairs == 3  # b, e, f: `a` lacks the system's second turn, `c` one generation, `d` the system


def test_scores_of_repeats_are_averaged_before_they_are_paired() -> None:
    values = {BASELINE: [[50.0, 60.0, 70.0]], SYSTEM: [[60.0, 60.0, 70.0], [50.0, 62.0, 76.0], [52.0, 70.0, None]]}
    answers, scores = [], []
    for name, runs in values.items():
        for generation, run in enumerate(runs):
            for question, value in zip("abc", run, strict=True):
                answers.append(answer(name, question, generation=generation))
                scores.append(score(answers[-1], value, reason="" if value else "refused"))
    scored = ScoredAnswers(answers, scores)
    found = find(contrasts(scored, SYSTEMS, BASELINE), "judge")
    assert found.pairs == 2  # `c` lacks one of three scores
    assert found.estimate == pytest.approx((54 - 50 + 64 - 60) / 2)
    assert found.run_sd == pytest.approx(np.std([5.0, 1.0, 6.0], ddof=1))  # each run against the same baseline

    (baseline, system) = qualities(scored, SYSTEMS)
    assert (baseline.value, baseline.count, baseline.run_sd) == (60.0, 3, None)
    means = [190 / 3, 188 / 3, 122 / 2]  # each run over what it has
    assert (system.value, system.count) == (pytest.approx(np.mean(means)), 2)
    assert system.run_sd == pytest.approx(np.std(means, ddof=1))


def test_questions_are_resampled_in_the_order_of_their_ids_as_strings() -> None:
    ids = [str(number) for number in range(8, 14)]
    gains = dict(zip(ids, (0.0, 1.0, 5.0, 20.0, -3.0, 2.0), strict=True))
    answers = [answer(name, question) for question in ids for name in SYSTEMS]
    scores = [score(row, 50.0 + (gains[row.question] if row.system == SYSTEM else 0.0)) for row in answers]
    found = find(contrasts(ScoredAnswers(answers, scores), SYSTEMS, BASELINE), "judge")

    def ends(order: list[str]) -> tuple[float, float]:
        interval = mean_difference(np.array([gains[question] for question in order]), np.zeros(len(order)))
        return float(interval.low), float(interval.high)

    assert (found.low, found.high) == pytest.approx(ends(["10", "11", "12", "13", "8", "9"]))
    assert (found.low, found.high) != pytest.approx(ends(ids))


def mixed() -> ScoredAnswers:
    """Judge scores of three tasks, one of them QA, and of a second turn."""
    answers, scores = [], []
    for name, gain in ((BASELINE, 0.0), (SYSTEM, -20.0)):
        for task, start in (("qa", 30.0), ("rag", 60.0), ("mt-bench", 80.0)):
            for number in range(3):
                row = answer(name, f"{task}{number}", task)
                answers.append(row)
                scores.append(score(row, start + (gain * (2.0 if task == "qa" else 1.0) if number else 0.0)))
        for number in range(2):
            answers.append(answer(name, f"mt-bench{number}", "mt-bench", turn=2))
            scores.append(score(answers[-1], 50.0 + gain))
    return ScoredAnswers(answers, scores)


def test_the_judges_total_is_that_of_first_turns_without_qa_and_tasks_are_exploratory() -> None:
    found = contrasts(mixed(), SYSTEMS, BASELINE)
    judged = {row.task: row for row in found if row.measure == "judge"}
    assert list(judged) == ["all", "mt-bench", "qa", "rag"]
    assert judged["all"].pairs == 6 and judged["all"].estimate == pytest.approx(-40 / 3)
    assert judged["qa"].pairs == 3 and judged["qa"].estimate == pytest.approx(-80 / 3)
    assert [row.exploratory for row in judged.values()] == [False, True, True, True]
    later = find(found, "judge, turn 2")
    assert (later.pairs, later.estimate, later.low, later.high) == (2, -20.0, -20.0, -20.0)


def test_the_screen_selects_changes_of_twenty_points_or_more_of_the_total() -> None:
    found = screen(mixed(), SYSTEMS, BASELINE)
    assert [row.question for row in found] == ["mt-bench1", "mt-bench2", "rag1", "rag2"]
    assert {row.difference for row in found} == {-20.0}
    assert (found[0].scores, found[0].baseline_scores) == ((60.0,), (80.0,))

    def difference(points: float) -> list[str]:
        answers = [answer(name, "1") for name in SYSTEMS]
        scored = [score(answers[0], 50.0), score(answers[1], 50.0 + points)]
        return [row.question for row in screen(ScoredAnswers(answers, scored), SYSTEMS, BASELINE)]

    assert difference(20.0) == difference(-20.0) == ["1"] and difference(19.9) == []


def test_qa_alone_is_its_own_total() -> None:
    answers = [answer(name, question, "qa") for name in SYSTEMS for question in "ab"]
    found = contrasts(ScoredAnswers(answers, [score(row, 10.0) for row in answers]), SYSTEMS, BASELINE)
    assert find(found, "judge").pairs == 2


def with_costs(ms: dict[str, list[list[float]]]) -> list[Answer]:
    """Answers of 10 tokens by system, generation and question."""
    return [
        answer(name, str(question), generation=generation, server_ms=value)
        for name, runs in ms.items()
        for generation, run in enumerate(runs)
        for question, value in enumerate(run)
    ]


def test_questions_without_saving_are_counted_in_each_generation() -> None:
    scored = ScoredAnswers(with_costs({BASELINE: [[80, 80, 80]], SYSTEM: [[50, 80, 90], [50, 60, 79]]}), [])
    assert questions_without_saving(scored, SYSTEMS, BASELINE) == {
        SYSTEM: (NoSaving(0, 2, 3, 2 / 3, ("1", "2")), NoSaving(1, 0, 3, 0.0, ()))
    }


def test_the_sd_of_runs_of_g_is_that_of_each_runs_pooled_change() -> None:
    answers = with_costs({BASELINE: [[80, 120]], SYSTEM: [[50, 100], [50, 90], [60, 100]]})
    found = find(contrasts(ScoredAnswers(answers, []), SYSTEMS, BASELINE), "g")
    assert found.estimate == pytest.approx(150 / 200 - 1)
    assert found.run_sd == pytest.approx(np.std([-0.25, -0.30, -0.20], ddof=1))


def test_a_system_that_asks_no_server_has_no_g() -> None:
    scored = ScoredAnswers(with_costs({BASELINE: [[80, 80]], SYSTEM: [[0, 0]]}), [])
    assert contrasts(scored, SYSTEMS, BASELINE) == []
    assert questions_without_saving(scored, SYSTEMS, BASELINE) == {}
    assert contrasts(scored, SYSTEMS, SYSTEM) == []


def test_every_system_is_held_against_the_baseline_in_their_order() -> None:
    answers = [answer(name, question) for name in (BASELINE, OTHER, SYSTEM) for question in "ab"]
    found = contrasts(ScoredAnswers(answers, []), (BASELINE, OTHER, SYSTEM), OTHER)
    assert [(row.system, row.baseline) for row in found] == [(BASELINE, OTHER), (SYSTEM, OTHER)]


def test_a_score_without_an_answer_counts_nowhere() -> None:
    answers = [answer(name, question) for name in SYSTEMS for question in "ab"]
    gone = answer(SYSTEM, "removed")
    scored = ScoredAnswers(answers, [score(gone, 10.0)])
    assert qualities(scored, SYSTEMS) == []


def test_reference_metrics_are_contrasted_and_parts_of_a_corpus_are_not() -> None:
    answers = [answer(name, question) for name in SYSTEMS for question in "ab"]
    scores = [score(row, 100.0, metric) for row in answers for metric in ("accuracy", "bleu_ngrams_1", "f1")]
    scored = ScoredAnswers(answers, scores)
    assert {row.measure for row in contrasts(scored, SYSTEMS, BASELINE)} == {"g", "accuracy", "f1"}
    assert {row.metric for row in qualities(scored, SYSTEMS)} == {"f1"}  # accuracy is its own command's
