"""Texts of a server against plain sampling: a toy model whose answers are kept, and the chi-square of joint texts."""

from collections.abc import Sequence

import numpy as np
from scipy import stats

from hyco_export.protocol.wire import Sampling
from tests.support.dense import sampling_distribution
from tests.support.scripted import ToyLanguageModel

MIN_EXPECTED = 5.0  # of a cell


class MemoisedModel(ToyLanguageModel):
    """The toy model, flatter, with its answers kept: there are a few thousand contexts."""

    def __init__(self, vocab_size: int, stop_bias: float = -1.0) -> None:
        super().__init__(vocab_size=vocab_size, seed=5, stop_bias=stop_bias)
        self._known: dict[tuple[int, ...], np.ndarray] = {}

    def logits(self, ids: Sequence[int]) -> np.ndarray:
        key = tuple(ids)
        if key not in self._known:
            self._known[key] = super().logits(ids) * np.float32(0.5)
        return self._known[key]


def chi_square(
    model: ToyLanguageModel, prompt: Sequence[int], sampling: Sampling, texts: Sequence[Sequence[int]]
) -> tuple[float, int]:
    """p-value of the joint distribution of all tokens of the texts, which are equally long, against plain sampling, and
    how many texts are expected often enough to count by themselves. 0 for a text that plain sampling cannot say."""
    expected: dict[tuple[int, ...], float] = {(): float(len(texts))}
    for _ in texts[0]:
        longer = {}
        for context, mass in expected.items():
            p = sampling_distribution(model.logits([*prompt, *context])[None], sampling)[0].astype(np.float64)
            longer |= {(*context, token): mass * p[token] / p.sum() for token in np.flatnonzero(p).tolist()}
        expected = longer
    counts = dict.fromkeys(expected, 0)
    common = [context for context, mass in expected.items() if mass >= MIN_EXPECTED]
    for text in texts:
        if tuple(text) not in counts:
            return 0.0, len(common)
        counts[tuple(text)] += 1
    observed = [float(counts[context]) for context in common]
    wanted = [expected[context] for context in common]
    observed.append(len(texts) - sum(observed))
    wanted.append(len(texts) - sum(wanted))
    return float(stats.chisquare(observed, wanted).pvalue), len(common)
