"""The engine end to end in sampling mode: many seeds, several rounds each, against the toy model's own distribution.

Catches what tests of the pure rules cannot: a draw used twice in successive rounds, a wrong position or row in its key,
a context that lost a token.
"""

from collections.abc import Sequence

import numpy as np
import pytest

from hyco_export.protocol import wire
from hyco_export.protocol.tree import ROOT
from hyco_export.server.admission import Facts
from hyco_export.server.engine import Engine
from tests.support.sampling_law import MemoisedModel, chi_square
from tests.support.scripted import ScriptedSession, ToyLanguageModel

VOCAB = 8
PROMPT = [3, 4]
TOKENS = 4
SEEDS = 6000
ALPHA = 1e-4
SAMPLING = wire.Sampling(1.0, 5, 0.95)


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


@pytest.mark.slow
@pytest.mark.parametrize(("rule", "lossless"), [("exact", True), ("epsilon", False)])
def test_sampled_texts_follow_plain_sampling_under_exact_and_not_under_epsilon(rule: str, lossless: bool) -> None:
    model = MemoisedModel(VOCAB)
    facts = Facts(VOCAB, frozenset(), 64)
    engine = Engine(lambda: ScriptedSession(model), facts)
    texts = [generate(engine, model, rule, seed) for seed in range(SEEDS)]
    assert {len(text) for text in texts} == {TOKENS}
    p_value, _ = chi_square(model, PROMPT, SAMPLING, texts)
    assert (p_value > ALPHA) == lossless, f"{rule}: p = {p_value:.2e}"
