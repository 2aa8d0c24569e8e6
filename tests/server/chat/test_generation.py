"""The server's own loop draws by the verifier's law, and frees its session however it ends."""

import asyncio
from collections.abc import Sequence

import numpy as np
import pytest
from scipy import stats

from hyco_export.errors import ProtocolError
from hyco_export.protocol import wire
from hyco_export.server.admission import Facts
from hyco_export.server.chat.generation import Committed, Generation
from hyco_export.server.engine import Engine
from hyco_export.server.metrics import Metrics
from tests.support.dense import sampling_distribution
from tests.support.scripted import ScriptedSession, ToyLanguageModel

VOCAB, TOKENS, SEEDS, ALPHA = 6, 3, 1_500, 1e-4
MIN_EXPECTED = 5.0
PROMPT = [3, 4]
SAMPLING = wire.Sampling(1.0, 4, 0.95)
FACTS = Facts(VOCAB, frozenset({1}), 256, server_steps=2)


class Memoised(ToyLanguageModel):
    """The toy model, flatter, with its answers kept."""

    def __init__(self) -> None:
        super().__init__(vocab_size=VOCAB, seed=5, stop_bias=-99.0)
        self._known: dict[tuple[int, ...], np.ndarray] = {}

    def logits(self, ids: Sequence[int]) -> np.ndarray:
        key = tuple(ids)
        if key not in self._known:
            self._known[key] = super().logits(ids) * np.float32(0.5)
        return self._known[key]


def engine_of(model: ToyLanguageModel, facts: Facts = FACTS) -> Engine:
    return Engine(lambda: ScriptedSession(model), facts)


def generation(engine: Engine, seed: int = 1, tokens: int = TOKENS, gone: bool = False) -> Generation:
    side, steps = ("server", 2) if engine.facts.server_steps else ("device", 0)
    request = wire.PrimeRequest(1, PROMPT, SAMPLING, wire.EXACT, seed, tokens, side, steps, "")
    return Generation(engine, Metrics(lambda: 0, lambda: 0), asyncio.to_thread, request, "", lambda: gone)


async def drawn(engine: Engine, seed: int, tokens: int = TOKENS) -> list[Committed]:
    one = generation(engine, seed, tokens)
    try:
        await one.open()
        return [committed async for committed in one.pieces()]
    finally:
        one.close()


def test_texts_are_distributed_as_plain_sampling() -> None:
    model = Memoised()
    engine = engine_of(model)

    async def all_seeds() -> list[tuple[int, ...]]:
        return [tuple(token for piece in await drawn(engine, seed) for token in piece.tokens) for seed in range(SEEDS)]

    expected: dict[tuple[int, ...], float] = {(): float(SEEDS)}
    for _ in range(TOKENS):
        longer = {}
        for context, mass in expected.items():
            p = sampling_distribution(model.logits([*PROMPT, *context])[None], SAMPLING)[0].astype(np.float64)
            longer |= {(*context, token): mass * p[token] / p.sum() for token in np.flatnonzero(p).tolist()}
        expected = longer
    counts = dict.fromkeys(expected, 0)
    for text in asyncio.run(all_seeds()):
        counts[text] += 1  # a KeyError: a text that plain sampling cannot say
    common = [text for text, mass in expected.items() if mass >= MIN_EXPECTED]
    rare = SEEDS - sum(expected[text] for text in common)
    seen = [*(counts[text] for text in common), SEEDS - sum(counts[text] for text in common)]
    wanted = [*(expected[text] for text in common), rare]
    assert len(common) > 15
    assert stats.chisquare(seen, wanted).pvalue > ALPHA


def test_rounds_commit_several_tokens_and_end_at_the_cap() -> None:
    engine = engine_of(Memoised())
    pieces = asyncio.run(drawn(engine, 1, 40))
    assert len(pieces[0].tokens) == 1
    assert sum(len(piece.tokens) for piece in pieces) == 40 and len(pieces) < 40
    assert [piece.finished for piece in pieces] == [""] * (len(pieces) - 1) + ["length"]
    assert engine.session_count == 0


def test_without_a_head_every_round_is_one_token() -> None:
    pieces = asyncio.run(drawn(engine_of(Memoised(), Facts(VOCAB, frozenset({1}), 256)), 1, 7))
    assert [len(piece.tokens) for piece in pieces] == [1] * 7


def test_usage_counts_prompt_answer_and_server_time() -> None:
    engine = engine_of(Memoised())

    async def run() -> Generation:
        one = generation(engine, tokens=9)
        await one.open()
        assert (one.usage.completion_tokens, one.usage.server_ms > 0) == (1, True)
        async for _ in one.pieces():
            pass
        return one

    one = asyncio.run(run())
    assert (one.usage.prompt_tokens, one.usage.completion_tokens, one.usage.total_tokens) == (2, 9, 11)
    assert engine.session_count == 1  # kept for whoever closes it
    one.close()
    one.close()
    assert engine.session_count == 0 and engine.reserved_bytes == 0


def test_a_caller_that_has_gone_gets_no_pass() -> None:
    engine = engine_of(Memoised())
    one = generation(engine, gone=True)
    with pytest.raises(ProtocolError) as refused:
        asyncio.run(one.open())
    one.close()
    assert refused.value.code == "cancelled" and engine.session_count == 0


def test_several_generations_share_passes_and_change_nothing_in_each_other() -> None:
    async def together() -> list[list[Committed]]:
        engine = engine_of(Memoised())
        return list(await asyncio.gather(*(drawn(engine, seed, 20) for seed in range(6))))

    alone = [asyncio.run(drawn(engine_of(Memoised()), seed, 20)) for seed in range(6)]
    assert asyncio.run(together()) == alone
