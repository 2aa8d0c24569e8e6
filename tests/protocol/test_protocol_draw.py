"""PROTOCOL.md's chapters on the draw and the hand-off, taken literally by a client that knows nothing of the package.

Everything above the line is written from the text alone: plain Python, no numpy, no module of the server's.
"""

import json
import math
import re
import struct
from itertools import accumulate

import msgspec
import numpy as np
import pytest

from hyco_export.core.handoff import HandoffSpec
from hyco_export.protocol import wire
from hyco_export.protocol.sampling import draws, node_probabilities, sampling_support
from hyco_export.server.admission import Facts, Limits
from hyco_export.server.engine import Engine, LocalTransport
from tests.protocol.test_wire import SPEC, TEXT
from tests.support.scripted import STOP_ID, VOCAB_SIZE, WINDOW, ScriptedSession, ToyLanguageModel

WORD = (1 << 64) - 1


def philox(key: tuple[int, int], element: int) -> int:
    """Element `element` of the stream."""
    block, place = divmod(element, 4)
    c0, c1, c2, c3 = block + 1, 0, 0, 0
    k0, k1 = key
    for number in range(10):
        if number:
            k0, k1 = (k0 + 0x9E3779B97F4A7C15) & WORD, (k1 + 0xBB67AE8584CAA73B) & WORD
        a, b = 0xD2E7470EE14C6C93 * c0, 0xCA5A826395121157 * c2
        c0, c1, c2, c3 = (b >> 64) ^ c1 ^ k0, b & WORD, (a >> 64) ^ c3 ^ k1, a & WORD
    return (c0, c1, c2, c3)[place]


def uniform(seed: int, position: int, row: int) -> float:
    return (philox((seed, position), row) >> 11) * 2.0**-53


def f32(value: float) -> float:
    """Rounded to float32."""
    return struct.unpack("f", struct.pack("f", value))[0]


def softmax(scores: dict[int, float]) -> dict[int, float]:
    largest = max(scores.values())
    exponentials = {token: math.exp(f32(score - largest)) for token, score in scores.items()}
    total = math.fsum(exponentials.values())
    return {token: f32(value / total) for token, value in exponentials.items()}


def distribution(logits: list[float], temperature: float, top_k: int, top_p: float) -> dict[int, float]:
    """p~ by token, those without mass left out."""
    if temperature == 0:
        return {logits.index(max(logits)): 1.0}
    scores = {token: f32(logit / f32(temperature)) for token, logit in enumerate(logits)}
    if 0 < top_k < len(scores):
        edge = sorted(scores.values(), reverse=True)[top_k - 1]
        scores = {token: score for token, score in scores.items() if score >= edge}
    if top_p < 1:
        probs = softmax(scores)
        order = sorted(scores, key=lambda token: (scores[token], token))
        sums = [f32(total) for total in accumulate(probs[token] for token in order)]
        cut = {token for token, total in zip(order[:-1], sums, strict=False) if total <= f32(1 - top_p)}
        scores = {token: score for token, score in scores.items() if token not in cut}
    return softmax(scores)


def draw(probs: dict[int, float], u: float) -> int:
    tokens = sorted(probs)
    sums = list(accumulate(probs[token] for token in tokens))
    return next(token for token, total in zip(tokens, sums, strict=True) if total > u * sums[-1])


# ------------------------------------------------------------------------------------------------ against the server

SETTINGS = [(1.0, 64, 0.95), (0.7, 5, 0.9), (1.3, 0, 0.5), (1.0, 4, 1.0), (100.0, 3, 0.3), (0.0, 0, 1.0)]


def tied_logits(seed: int, rows: int = 5, vocabulary: int = 90) -> np.ndarray:
    """Few different values: ties at every edge."""
    values = np.random.default_rng(seed).integers(-6, 7, (rows, vocabulary)) / 2
    return values.astype(np.float32)


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("seed", [0, 20261011, 2**64 - 1])
def test_the_text_gives_the_servers_distribution_and_draws(settings: tuple[float, int, float], seed: int) -> None:
    for sample in range(20):
        logits = tied_logits(sample) if sample % 2 else np.random.default_rng(sample).normal(0, 3, (5, 90))
        logits = logits.astype(np.float32)
        positions = [4, 5, 5, 6, 5]
        ours = [distribution(row.tolist(), *settings) for row in logits]
        support = sampling_support(logits, wire.Sampling(*settings))
        for row, probs in enumerate(ours):
            mass = support.probs[row] > 0
            theirs = dict(zip(support.ids[row][mass].tolist(), support.probs[row][mass].tolist(), strict=True))
            assert {token: prob for token, prob in probs.items() if prob > 0} == theirs
        drawn = [
            draw(probs, uniform(seed, position, row))
            for row, (probs, position) in enumerate(zip(ours, positions, strict=True))
        ]
        assert drawn == draws(support, seed, np.array(positions)).tolist()


def test_a_client_foresees_every_draw_of_a_live_session() -> None:
    model = ToyLanguageModel(stop_bias=-1e9)
    facts = Facts(VOCAB_SIZE, frozenset({STOP_ID}), 256, "head", WINDOW, 4)
    info = wire.ServerInfo(1, "t", "v", "t", VOCAB_SIZE, [STOP_ID], "head", "k", 32, 64, 0, ["exact"], "thread-cpu")
    server = LocalTransport(Engine(lambda: ScriptedSession(model), facts, Limits(prompt_limit=64)), info)
    seed, sampling, ids = 7, (0.9, 6, 0.8), [5, 9, 2, 7]

    def foreseen(context: list[int], position: int, row: int) -> int:
        return draw(distribution(model.logits(context).tolist(), *sampling), uniform(seed, position, row))

    primed = server.prime(
        wire.PrimeRequest(1, ids, wire.Sampling(*sampling), wire.EXACT, seed, 60, "device", 0, "", trace=True)
    )
    assert primed.root == foreseen(ids, len(ids) - 1, 0)
    ids.append(primed.root)
    tokens, parents, depths = [3, 4, 3, 5, 6], [-1, -1, 0, 2, 1], [1, 1, 2, 3, 2]
    paths = [[3], [4], [3, 3], [3, 3, 5], [4, 6]]
    for number in range(1, 9):
        request = wire.VerifyRequest(1, len(ids), wire.committed_digest(ids), tokens, parents)
        reply = server.verify(primed.session, number, request)
        assert reply.evidence is not None
        root = len(ids) - 1
        rows = [foreseen(ids, root, 0)]
        places = enumerate(zip(paths, depths, strict=True), 1)
        rows += [foreseen(ids + path, root + depth, row) for row, (path, depth) in places]
        assert reply.evidence.draws == rows
        ids += reply.tokens


def test_the_worked_example_is_right_and_stands_in_the_text() -> None:
    text = " ".join(TEXT.split())
    seed, position = 20261011, 4
    root = [philox((seed, position), element) for element in range(2)]
    below = [philox((seed, position + 1), element) for element in range(3)]
    for words in (root, below):
        assert f"`{' '.join(f'{word:016x}' for word in words)}`" in text
    numbers = [uniform(seed, position, 0), uniform(seed, position + 1, 1), uniform(seed, position + 1, 2)]
    for number in numbers:
        assert f"{number!r}" in text
    assert [draw({3: 0.5, 5: 0.25, 9: 0.25}, number) for number in numbers] == [9, 5, 3]
    assert "the three draws are 9, 5 and 3" in text
    assert root == np.random.Philox(key=np.array([seed, position], np.uint64)).random_raw(2).tolist()


def test_epsilon_is_compared_in_float32() -> None:
    assert f"0.005 is {f32(0.005)!r}" in TEXT
    logits = np.log(np.array([[0.005, 0.995]])).astype(np.float32)
    prob = node_probabilities(sampling_support(logits, wire.Sampling(1.0, 0, 1.0)), [0], [-1])[0]
    assert float(prob) == distribution(logits[0].tolist(), 1.0, 0, 1.0)[0]


def test_the_hand_offs_json_is_what_a_head_artifact_holds() -> None:
    (block,) = re.findall(r"```json handoff\n(.*?)\n```", TEXT, flags=re.DOTALL)
    assert msgspec.convert(json.loads(block), HandoffSpec) == SPEC
    assert json.loads(block) == msgspec.to_builtins(SPEC)
