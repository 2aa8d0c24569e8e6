"""Two systems over the same questions: server time and scores with intervals, and the questions that stand out.

A question counts for a system when it is complete: every generation has all of its turns for g, or a score. Nothing
missing is imputed. A question's generations are averaged before systems are paired.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from hyco_export.evaluate.quality.evaluation_folder import (
    ALL_TASKS,
    SERVER_TIME,
    Answer,
    Contrast,
    NoSaving,
    Quality,
    Score,
    Screened,
)
from hyco_export.evaluate.quality.statistics import (
    LEAST_PAIRS,
    Interval,
    mean_difference,
    ratio_change,
    sample_sd,
)

JUDGE = "judge"
JUDGE_METRICS = (JUDGE, "fluency", "recall", "precision", "f1")  # of the question-only judge, and of HELMET's
JUDGED_APART = frozenset({"qa"})  # a judge without a reference answer is no test of facts (paper, Appendix E)
SCREEN_POINTS = 20.0  # of a judge's 0 to 100
PARTS = "bleu_"  # scores that only a corpus sums up begin with it: their means say nothing

ByQuestion = Mapping[str, Mapping[int, float]]  # values by generation
Tasks = Mapping[str, str]  # of questions


class Cost(NamedTuple):
    """What all turns of a question took: ms of the server, and tokens."""

    ms: float
    tokens: float


class ScoredAnswers:
    """Answers and scores, looked up by system and measure."""

    def __init__(self, answers: Sequence[Answer], scores: Iterable[Score]) -> None:
        self.tasks: Tasks = {answer.question: answer.task for answer in answers}
        self._answers = answers
        self.generations: dict[str, set[int]] = defaultdict(set)
        self._turns: dict[str, int] = defaultdict(int)
        for answer in answers:
            self.generations[answer.system].add(answer.generation)
            self._turns[answer.question] = max(self._turns[answer.question], answer.turn)
        answered = {answer.place for answer in answers}
        self._values: dict[str, dict[str, dict[str, dict[int, float]]]] = defaultdict(lambda: defaultdict(dict))
        for score in scores:
            if score.value is not None and score.place in answered and not score.metric.startswith(PARTS):
                by_question = self._values[measure_name(score)][score.system]
                by_question.setdefault(score.question, {})[score.generation] = score.value

    @property
    def measures(self) -> list[str]:
        """Metrics with a score, in alphabetical order."""
        return sorted(self._values)

    def values(self, measure: str, system: str) -> ByQuestion:
        """Scores by question and generation; missing ones are not in it."""
        return self._values.get(measure, {}).get(system, {})

    def costs(self, system: str) -> dict[str, dict[int, Cost]]:
        """By question and generation, where every turn of the question was answered."""
        turns: dict[tuple[str, int], list[Answer]] = defaultdict(list)
        for answer in self._answers:
            if answer.system == system and answer.failure is None:
                turns[answer.question, answer.generation].append(answer)
        found: dict[str, dict[int, Cost]] = defaultdict(dict)
        for (question, generation), rows in turns.items():
            cost = Cost(sum(row.server_ms for row in rows), sum(row.tokens for row in rows))
            if len(rows) == self._turns[question] and cost.tokens:
                found[question][generation] = cost
        return found

    def has_complete(self, measure: str, system: str) -> bool:
        """Has any question a score in every generation."""
        return any(self.is_complete(system, row) for row in self.values(measure, system).values())

    def is_complete(self, system: str, generations: Iterable[int]) -> bool:
        """Are these all generations of the system."""
        return self.generations[system] == set(generations)


def measure_name(score: Score) -> str:
    """The metric; of a later turn `judge, turn 2`: the paper's aggregates are those of first turns."""
    return score.metric if score.turn == 1 else f"{score.metric}, turn {score.turn}"


def is_judged(measure: str) -> bool:
    """Is it a judge's metric, of any turn."""
    return measure.partition(",")[0] in JUDGE_METRICS


def contrasts(scored: ScoredAnswers, systems: Sequence[str], baseline: str) -> list[Contrast]:
    """Every other system against the baseline: g, then every metric; over all tasks, then task by task."""
    return [
        contrast
        for system in systems
        if system != baseline
        for contrast in (
            *_cost_contrasts(scored, system, baseline),
            *(one for name in scored.measures for one in _score_contrasts(scored, name, system, baseline)),
        )
    ]


def qualities(scored: ScoredAnswers, systems: Sequence[str]) -> list[Quality]:
    """Every metric of a judge and every system, over all tasks, then task by task, where a question is complete."""
    found = []
    for system in systems:
        for measure in filter(is_judged, scored.measures):
            values = scored.values(measure, system)
            for task, questions in task_groups(sorted(values), scored.tasks, measure):
                rows = [values[question] for question in questions]
                runs = [[row[run] for row in rows if run in row] for run in sorted(scored.generations[system])]
                means = [float(np.mean(run)) for run in runs if run]
                count = sum(scored.is_complete(system, row) for row in rows)
                if count:
                    found.append(Quality(system, task, measure, float(np.mean(means)), count, sample_sd(means)))
    return found


def questions_without_saving(
    scored: ScoredAnswers, systems: Sequence[str], baseline: str
) -> dict[str, tuple[NoSaving, ...]]:
    """By system, one entry a generation; the baseline's g of a question is that of its mean generation."""
    compared = {question: _mean_cost(runs) for question, runs in scored.costs(baseline).items()}
    found = {}
    for system in systems:
        costs = scored.costs(system)
        if (
            system == baseline
            or not _is_measured(compared.values())
            or not _is_measured(map(_mean_cost, costs.values()))
        ):
            continue
        rows = []
        for run in sorted(scored.generations[system]):
            pairs = sorted(question for question in costs if run in costs[question] and question in compared)
            slow = tuple(question for question in pairs if _g(costs[question][run]) >= _g(compared[question]))
            if pairs:
                rows.append(NoSaving(run, len(slow), len(pairs), len(slow) / len(pairs), slow))
        found[system] = tuple(rows)
    return found


def screen(scored: ScoredAnswers, systems: Sequence[str], baseline: str) -> list[Screened]:
    """Questions of the judge's aggregate whose mean score moved by SCREEN_POINTS or more, largest decrease first."""
    found = []
    for system in systems:
        if system == baseline:
            continue
        values, compared = scored.values(JUDGE, system), scored.values(JUDGE, baseline)
        for question in _complete(scored, (values, system), (compared, baseline)):
            difference = float(np.mean([*values[question].values()]) - np.mean([*compared[question].values()]))
            if abs(difference) >= SCREEN_POINTS and scored.tasks[question] not in JUDGED_APART:
                scores, others = (
                    tuple(row[run] for run in sorted(row)) for row in (values[question], compared[question])
                )
                task = scored.tasks[question]
                found.append(Screened(baseline, system, question, task, difference, scores, others))
    return sorted(found, key=lambda row: (systems.index(row.system), row.difference, row.question))


def task_groups(questions: Sequence[str], tasks: Tasks, measure: str) -> list[tuple[str, list[str]]]:
    """The questions of all tasks, then of each where there are several. The question-only judge's total leaves
    JUDGED_APART out, unless there is nothing else."""
    names = sorted({tasks[question] for question in questions})
    left_out = JUDGED_APART if measure.startswith(JUDGE) and not JUDGED_APART.issuperset(names) else frozenset()
    total = (ALL_TASKS, [question for question in questions if tasks[question] not in left_out])
    if len(names) < 2:
        return [total]
    return [total, *((name, [question for question in questions if tasks[question] == name]) for name in names)]


def _score_contrasts(scored: ScoredAnswers, measure: str, system: str, baseline: str) -> Iterable[Contrast]:
    values, compared = scored.values(measure, system), scored.values(measure, baseline)
    complete = _complete(scored, (values, system), (compared, baseline))
    for task, questions in task_groups(complete, scored.tasks, measure):
        if len(questions) < LEAST_PAIRS:
            continue
        ours, theirs = (
            np.array([np.mean([*side[question].values()]) for question in questions]) for side in (values, compared)
        )
        runs = [
            float(np.mean([values[question][run] for question in questions]) - theirs.mean())
            for run in sorted(scored.generations[system])
        ]
        yield _contrast(mean_difference(ours, theirs), baseline, system, measure, task, len(questions), sample_sd(runs))


def _cost_contrasts(scored: ScoredAnswers, system: str, baseline: str) -> Iterable[Contrast]:
    costs, compared = scored.costs(system), scored.costs(baseline)
    complete = _complete(scored, (costs, system), (compared, baseline))
    for task, questions in task_groups(complete, scored.tasks, SERVER_TIME):
        ours, theirs = ([_mean_cost(side[question]) for question in questions] for side in (costs, compared))
        if len(questions) < LEAST_PAIRS or not _is_measured(ours) or not _is_measured(theirs):
            continue
        (ms, tokens), (other_ms, other_tokens) = np.array(ours).T, np.array(theirs).T
        reference = other_ms.sum() / other_tokens.sum()
        pooled = [_pooled(costs[question][run] for question in questions) for run in sorted(scored.generations[system])]
        runs = [_g(run) / reference - 1.0 for run in pooled]
        change = ratio_change(ms, tokens, other_ms, other_tokens)
        yield _contrast(change, baseline, system, SERVER_TIME, task, len(questions), sample_sd(runs))


def _contrast(
    interval: Interval, baseline: str, system: str, measure: str, task: str, pairs: int, run_sd: float | None
) -> Contrast:
    estimate, low, high = (float(end) for end in interval)
    return Contrast(baseline, system, measure, task, estimate, low, high, pairs, task != ALL_TASKS, run_sd)


def _complete(scored: ScoredAnswers, *sides: tuple[Mapping[str, Mapping[int, object]], str]) -> list[str]:
    """Questions that have every generation of both systems, sorted as strings."""
    found = [
        {question for question, runs in values.items() if scored.is_complete(system, runs)} for values, system in sides
    ]
    return sorted(set.intersection(*found))


def _pooled(costs: Iterable[Cost]) -> Cost:
    rows = list(costs)
    return Cost(sum(row.ms for row in rows), sum(row.tokens for row in rows))


def _mean_cost(runs: Mapping[int, Cost]) -> Cost:
    total = _pooled(runs.values())
    return Cost(total.ms / len(runs), total.tokens / len(runs))


def _is_measured(costs: Iterable[Cost]) -> bool:
    """Was a server asked at all: g of the device alone is no saving."""
    return any(cost.ms > 0.0 for cost in costs)


def _g(cost: Cost) -> float:
    return cost.ms / cost.tokens
