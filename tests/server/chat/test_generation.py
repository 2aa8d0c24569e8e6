"""The server's own loop draws by the verifier's law, and frees its session however it ends."""

import asyncio

import pytest

from hyco_export.errors import ProtocolError
from hyco_export.protocol import wire
from hyco_export.server.admission import Facts
from hyco_export.server.chat.generation import Committed, Generation
from hyco_export.server.engine import Engine
from hyco_export.server.metrics import Metrics
from tests.support.sampling_law import MemoisedModel, chi_square
from tests.support.scripted import ScriptedSession, ToyLanguageModel

VOCAB, TOKENS, SEEDS, ALPHA = 6, 3, 1_500, 1e-4
PROMPT = [3, 4]
SAMPLING = wire.Sampling(1.0, 4, 0.95)
FACTS = Facts(VOCAB, frozenset({1}), 256, server_steps=2)


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
    model = MemoisedModel(VOCAB, stop_bias=-99.0)
    engine = engine_of(model)

    async def all_seeds() -> list[tuple[int, ...]]:
        return [tuple(token for piece in await drawn(engine, seed) for token in piece.tokens) for seed in range(SEEDS)]

    pvalue, common = chi_square(model, PROMPT, SAMPLING, asyncio.run(all_seeds()))
    assert common > 15
    assert pvalue > ALPHA


def test_rounds_commit_several_tokens_and_end_at_the_cap() -> None:
    engine = engine_of(MemoisedModel(VOCAB, stop_bias=-99.0))
    pieces = asyncio.run(drawn(engine, 1, 40))
    assert len(pieces[0].tokens) == 1
    assert sum(len(piece.tokens) for piece in pieces) == 40 and len(pieces) < 40
    assert [piece.finished for piece in pieces] == [""] * (len(pieces) - 1) + ["length"]
    assert engine.session_count == 0


def test_without_a_head_every_round_is_one_token() -> None:
    pieces = asyncio.run(
        drawn(engine_of(MemoisedModel(VOCAB, stop_bias=-99.0), Facts(VOCAB, frozenset({1}), 256)), 1, 7)
    )
    assert [len(piece.tokens) for piece in pieces] == [1] * 7


def test_usage_counts_prompt_answer_and_server_time() -> None:
    engine = engine_of(MemoisedModel(VOCAB, stop_bias=-99.0))

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
    engine = engine_of(MemoisedModel(VOCAB, stop_bias=-99.0))
    one = generation(engine, gone=True)
    with pytest.raises(ProtocolError) as refused:
        asyncio.run(one.open())
    one.close()
    assert refused.value.code == "cancelled" and engine.session_count == 0


def test_several_generations_share_passes_and_change_nothing_in_each_other() -> None:
    async def together() -> list[list[Committed]]:
        engine = engine_of(MemoisedModel(VOCAB, stop_bias=-99.0))
        return list(await asyncio.gather(*(drawn(engine, seed, 20) for seed in range(6))))

    alone = [asyncio.run(drawn(engine_of(MemoisedModel(VOCAB, stop_bias=-99.0)), seed, 20)) for seed in range(6)]
    assert asyncio.run(together()) == alone
