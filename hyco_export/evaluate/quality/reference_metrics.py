"""Answers against references: BLEU, ROUGE, numeric accuracy, containment. All values are in points of 100.

| task | metric | by |
|---|---|---|
| translation | `bleu` of the corpus, from the parts of every answer | sacrebleu, its defaults |
| summaries | `rougeL`, `rougeLsum`: F1, stemmed, the best of the references, as in HELMET | rouge-score |
| `math_reasoning` | `accuracy`: the answer's last number is the reference's | |
| `rag`, `qa` | `containment`: a reference stands in the answer, word by word, both normalised as in SQuAD | |

Only first turns are scored: no set has references for later ones.
"""

import re
import statistics
import string
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from decimal import Decimal, InvalidOperation
from functools import cache
from typing import Any

from hyco_export.evaluate.quality.evaluation_folder import Answer, Quality, Score
from hyco_export.evaluate.quality.novels import NOVELS
from hyco_export.evaluate.quality.statistics import sample_sd

BLEU, ROUGE_L, ROUGE_L_SUM, ACCURACY, CONTAINMENT = "bleu", "rougeL", "rougeLsum", "accuracy", "containment"
BLEU_ORDERS = 4
BLEU_PARTS = (
    *(f"bleu_matches_{order}" for order in range(1, BLEU_ORDERS + 1)),
    *(f"bleu_ngrams_{order}" for order in range(1, BLEU_ORDERS + 1)),
    "bleu_length",
    "bleu_reference_length",
)
POINTS = 100.0
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?|-?\.\d+")
ARTICLE = re.compile(r"\b(?:a|an|the)\b")
PUNCTUATION = str.maketrans("", "", string.punctuation)

Measures = Callable[[str, Sequence[str]], dict[str, float]]


def bleu_parts(text: str, references: Sequence[str]) -> dict[str, float]:
    """What a corpus sums up: n-grams that match, n-grams, lengths."""
    from sacrebleu.metrics.bleu import BLEU as Bleu

    score = Bleu().corpus_score([text], [[reference] for reference in references])
    return dict(zip(BLEU_PARTS, [*score.counts, *score.totals, score.sys_len, score.ref_len], strict=True))


def corpus_bleu(parts: Iterable[Mapping[str, float]]) -> float:
    """BLEU of a corpus from the parts of its answers."""
    from sacrebleu.metrics.bleu import BLEU as Bleu

    listed = list(parts)
    sums = [int(sum(one[name] for one in listed)) for name in BLEU_PARTS]
    score = Bleu.compute_bleu(
        correct=sums[:BLEU_ORDERS], total=sums[BLEU_ORDERS:-2], sys_len=sums[-2], ref_len=sums[-1]
    )
    return float(score.score)


def rouge(text: str, references: Sequence[str]) -> dict[str, float]:
    """F1 of the longest common subsequences: of the whole texts, and line by line."""
    found = [_rouge_scorer().score(target=reference, prediction=text) for reference in references]
    return {metric: POINTS * max(one[metric].fmeasure for one in found) for metric in (ROUGE_L, ROUGE_L_SUM)}


@cache
def _rouge_scorer() -> Any:
    from rouge_score.rouge_scorer import RougeScorer

    return RougeScorer([ROUGE_L, ROUGE_L_SUM], use_stemmer=True)


def numeric_accuracy(text: str, references: Sequence[str]) -> dict[str, float]:
    """GSM8K's reference ends in `#### 1,234`; the answer's last number counts."""
    wanted = {last_number(reference) for reference in references} - {None}
    return {ACCURACY: POINTS * (last_number(text) in wanted)}


def last_number(text: str) -> Decimal | None:
    """The last number of a text, thousands' commas left out; None without one."""
    found = NUMBER.findall(text)
    try:
        return Decimal(found[-1].replace(",", "")) if found else None
    except InvalidOperation:
        return None


def containment(text: str, references: Sequence[str]) -> dict[str, float]:
    """Does the answer hold a reference, as whole words."""
    answer = f" {normalised(text)} "
    wanted = [normalised(reference) for reference in references]
    return {CONTAINMENT: POINTS * any(one and f" {one} " in answer for one in wanted)}


def normalised(text: str) -> str:
    """Lower case, without punctuation, articles and further spaces (SQuAD, Rajpurkar et al. 2016)."""
    return " ".join(ARTICLE.sub(" ", text.lower().translate(PUNCTUATION)).split())


MEASURES: dict[str, Measures] = {
    "translation": bleu_parts,
    "summarization": rouge,
    NOVELS: rouge,
    "math_reasoning": numeric_accuracy,
    "rag": containment,
    "qa": containment,
}
METRICS: dict[Measures, tuple[str, ...]] = {
    bleu_parts: BLEU_PARTS,
    rouge: (ROUGE_L, ROUGE_L_SUM),
    numeric_accuracy: (ACCURACY,),
    containment: (CONTAINMENT,),
}
SCORED = tuple(metric for metrics in METRICS.values() for metric in metrics)  # of an answer


def score_answers(answers: Iterable[Answer], references: Mapping[str, Sequence[str]]) -> Iterator[Score]:
    """Scores of first turns whose question has references; a failed answer has none, and says why.

    Args:
        references: by question id.
    """
    for answer in answers:
        measures, known = MEASURES.get(answer.task), references.get(answer.question)
        if measures is None or not known or answer.turn > 1:
            continue
        values: Mapping[str, float | None] = dict.fromkeys(METRICS[measures])
        if answer.failure is None:
            values = measures(answer.text, known)
        reason = "" if answer.failure is None else f"no answer: {answer.failure}"
        for metric, value in values.items():
            yield Score(*answer.place, metric, value, reason)


def quality(scores: Iterable[Score], tasks: Mapping[str, str]) -> list[Quality]:
    """The scores of a folder by system and task; BLEU is that of each generation's corpus.

    Args:
        tasks: by question id.
    """
    runs: dict[tuple[str, str, str], dict[int, dict[str, float]]] = defaultdict(lambda: defaultdict(dict))
    for score in scores:
        if score.value is not None:
            key = (score.system, tasks[score.question], score.metric)
            runs[key][score.generation][score.question] = score.value
    found = []
    for (system, task, metric), generations in runs.items():
        if metric == BLEU_PARTS[0]:
            parts = {name: runs[system, task, name] for name in BLEU_PARTS}
            values = [_generation_bleu(parts, generation) for generation in sorted(generations)]
            found.append(_quality(system, task, BLEU, values, generations))
        elif metric not in BLEU_PARTS:
            values = [statistics.fmean(generations[generation].values()) for generation in sorted(generations)]
            found.append(_quality(system, task, metric, values, generations))
    return found


def _generation_bleu(parts: Mapping[str, Mapping[int, Mapping[str, float]]], generation: int) -> float:
    questions = parts[BLEU_PARTS[0]][generation]
    return corpus_bleu({name: parts[name][generation][question] for name in BLEU_PARTS} for question in questions)


def _quality(
    system: str, task: str, metric: str, values: Sequence[float], generations: Mapping[int, Mapping[str, float]]
) -> Quality:
    common = set.intersection(*(set(questions) for questions in generations.values()))
    return Quality(system, task, metric, statistics.fmean(values), len(common), sample_sd(values))
