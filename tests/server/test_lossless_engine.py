"""The engine end to end in sampling mode: many seeds, several rounds each, against the toy model's own distribution.

Catches what tests of the pure rules cannot: a draw used twice in successive rounds, a wrong position or row in its key,
a context that lost a token.
"""

from collections.abc import Sequence

import numpy as np
import pytest
from scipy import stats

from hyco_export.protocol import wire
from hyco_export.protocol.tree import ROOT
from hyco_export.server.admission import Facts
from hyco_export.server.engine import Engine
from tests.support.dense import sampling_distribution
from tests.support.scripted import ScriptedSession, ToyLanguageModel

VOCAB = 8
PROMPT = [3, 4]
TOKENS = 4
SEEDS = 6000
ALPHA = 1e-4
MIN_EXPECTED = 5.0
SAMPLING = wire.Sampling(1.0, 5, 0.95)


class MemoisedModel(ToyLanguageModel):
    """The toy model with its answers kept: there are a few thousand contexts."""

    def __init__(self) -> None:
        super().__init__(vocab_size=VOCAB, seed=5)
        self._known: dict[tuple[int, ...], np.ndarray] = {}

    def logits(self, ids: Sequence[int]) -> np.ndarray:
        key = tuple(ids)
        if key not in self._known:
            self._known[key] = super().logits(ids) * np.float32(0.5)
        return self._known[key]


def likely_tree(model: ToyLanguageModel, ids: Sequence[int]) -> tuple[list[int], list[int]]:
    """Two children of the root and two of the first child, the likeliest ones."""
    first = np.argsort(-model.logits(ids))[:2].tolist()
    second = np.argsort(-model.logits([*ids, first[0]]))[:2].tolist()
    return [*first, *second], [ROOT, ROOT, 0, 0]


def generate(engine: Engine, model: ToyLanguageModel, rule: str, seed: int) -> list[int]:
    """The first TOKENS ids of a session."""
    acceptance = wire.Acceptance(rule, 0.05 if rule == "epsilon" else 1.0)
    request = wire.PrimeRequest(1, PROMPT, SAMPLING, acceptance, seed, TOKENS, "device", 0, "")
    reply = engine.prime(request)
    ids, number, finished = [*PROMPT, reply.root], 0, reply.finished
    while not finished:
        number += 1
        body = wire.VerifyRequest(1, len(ids), wire.committed_digest(ids), *likely_tree(model, ids))
        answer = engine.verify(reply.session, number, body)
        ids += answer.tokens
        finished = answer.finished
    engine.close(reply.session)
    return ids[len(PROMPT) :]


def chi_square(model: ToyLanguageModel, texts: Sequence[Sequence[int]]) -> float:
    """p-value of the joint distribution of all TOKENS tokens against plain sampling."""
    expected: dict[tuple[int, ...], float] = {(): float(len(texts))}
    for _ in range(TOKENS):
        longer = {}
        for context, mass in expected.items():
            p = sampling_distribution(model.logits([*PROMPT, *context])[None], SAMPLING)[0].astype(np.float64)
            longer |= {(*context, token): mass * p[token] / p.sum() for token in np.flatnonzero(p).tolist()}
        expected = longer
    counts = dict.fromkeys(expected, 0)
    for text in texts:
        if tuple(text) not in counts:
            return 0.0  # a text that plain sampling cannot say
        counts[tuple(text)] += 1
    common = [context for context, mass in expected.items() if mass >= MIN_EXPECTED]
    observed = [float(counts[context]) for context in common]
    wanted = [expected[context] for context in common]
    observed.append(len(texts) - sum(observed))
    wanted.append(len(texts) - sum(wanted))
    return float(stats.chisquare(observed, wanted).pvalue)


@pytest.mark.slow
@pytest.mark.parametrize(("rule", "lossless"), [("exact", True), ("epsilon", False)])
def test_sampled_texts_follow_plain_sampling_under_exact_and_not_under_epsilon(rule: str, lossless: bool) -> None:
    model = MemoisedModel()
    facts = Facts(VOCAB, frozenset(), 64)
    engine = Engine(lambda: ScriptedSession(model), facts)
    p_value = chi_square(model, [generate(engine, model, rule, seed) for seed in range(SEEDS)])
    assert (p_value > ALPHA) == lossless, f"{rule}: p = {p_value:.2e}"
