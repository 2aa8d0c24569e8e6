"""A round on the device needs the keep set's columns, never the vocabulary's (262,144 of Gemma's models).

Arrays cannot be listed after the fact, but their bytes can be counted: a vocabulary 512 times as large, with kept ids
all over it, must not raise the peak of what numpy and Python allocate.
"""

import tracemalloc
from collections.abc import Callable, Mapping

import msgspec
import numpy as np

from hyco_export.core.device_spec import GraphSpec
from hyco_export.core.handoff import LAYER_TYPES, KvRows
from hyco_export.core.recipe import Drafting
from hyco_export.device.backends import Device
from hyco_export.device.driver import generate
from hyco_export.device.head import GraphHead
from hyco_export.device.slm import GraphSlm
from hyco_export.device.systems import Settings, find_system, make_drafter, make_request
from hyco_export.protocol import wire
from tests.support.scripted import HANDOFF, HIDDEN, NO_TRAFFIC, WINDOW
from tests.support.toy_graphs import ToyEmbeddings, toy_head_spec, toy_slm_spec

KEPT, ROWS = 86_089, 32  # the paper's keep set and tree pass
VOCABULARY, LARGE_VOCABULARY = 262_144, 1 << 27
LARGEST_RISE = VOCABULARY  # bytes: one array of a byte a token
ROUNDS = 2
TOKENS = 1 + 2 * ROUNDS  # PRIME's, then an accepted one and a bonus each round


class FixedSession:
    """Answers every pass with the same arrays: what the graph gives out is not the device's to allocate."""

    def __init__(self, graph: GraphSpec) -> None:
        generator = np.random.default_rng(1)
        high = {"int32": KEPT, "uint16": 1 << 16, "uint8": 1 << 8}
        self._outputs = {
            each.name: generator.integers(0, high[each.dtype], each.shape, each.dtype) for each in graph.outputs
        }

    def run(self, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        return self._outputs

    def close(self) -> None:
        pass


class FirstNodeServer:
    """Accepts the first node of every tree; the bonus is a kept token."""

    traffic = NO_TRAFFIC

    def __init__(self, bonus: int) -> None:
        self._bonus = bonus
        self._length = 0

    def info(self) -> wire.ServerInfo:
        raise AssertionError("nobody asks")

    def prime(self, request: wire.PrimeRequest) -> wire.PrimeReply:
        self._length = len(request.prompt) + 1
        handoff = handoff_of(0, self._length - 1)
        return wire.PrimeReply(wire.PROTOCOL_VERSION, "one", self._bonus, self._length, "", handoff, 1.0)

    def verify(self, session: str, round_number: int, request: wire.VerifyRequest) -> wire.VerifyReply:
        assert len(request.tokens) == ROWS  # the budget is used: SLM children among them
        handoff = handoff_of(self._length - 1, 2)
        self._length += 2
        finished = "length" if round_number == ROUNDS else ""
        tokens = [request.tokens[0], self._bonus]
        return wire.VerifyReply(wire.PROTOCOL_VERSION, round_number, [0], [True], tokens, finished, handoff, 0, 1.0)

    def close_session(self, session: str) -> None:
        pass


def handoff_of(first: int, count: int) -> wire.Handoff:
    """Rows of 7 for positions first ..., the window's newest."""
    kept = min(count, WINDOW)
    rows = {layer_type: np.full((kept, 1, 2), 7, np.uint8) for layer_type in LAYER_TYPES}
    whole = bytes([7] * HIDDEN)
    return wire.Handoff(whole, whole, HANDOFF.pack_rows(KvRows(rows, rows)), first + count - kept)


def peak_of_a_generation(vocab_size: int, beside: Callable[[], object] = lambda: None) -> int:
    """Bytes allocated at most while a generation of two rounds runs; `beside` is called once in it."""
    kept = np.linspace(2, vocab_size - 1, KEPT).astype(np.int32)
    head = toy_head_spec(WINDOW, {"sliding": 4, "full": None})
    slm = toy_slm_spec(ROWS, 16, {"sliding": 64, "full": 64}, {"sliding": 8, "full": None})
    logits = msgspec.structs.replace(slm.tree.output("logits"), shape=(ROWS, KEPT))
    tree = msgspec.structs.replace(slm.tree, outputs=(*slm.tree.outputs[:-1], logits))
    slm = msgspec.structs.replace(slm, tree=tree, vocab_size=vocab_size)
    device = Device(
        GraphHead(head, kept, FixedSession(head.graph)),
        GraphSlm(slm, ToyEmbeddings(), FixedSession(tree), FixedSession(slm.prefill)),
        HANDOFF,
        kept,
    )
    settings = Settings(Drafting(slm_temperature=0.7), 0.005, 4, "head", vocab_size, frozenset({1}))
    system, bonus = find_system("hyco"), int(kept[-1])
    request = make_request(system, settings, "p", wire.Sampling(1.0, 64, 0.95), 1, TOKENS)
    drafter, prompt = make_drafter(system, settings, device), [int(token) for token in kept[::8000]]
    tracemalloc.start()
    try:
        trace = generate(prompt, request, drafter, FirstNodeServer(bonus))
        beside()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(trace.rounds) == ROUNDS and trace.tokens[-1] == bonus
    return peak


def test_a_round_allocates_nothing_that_grows_with_the_vocabulary() -> None:
    peak_of_a_generation(VOCABULARY)  # what is allocated once: imports, caches
    usual = peak_of_a_generation(VOCABULARY)
    assert peak_of_a_generation(LARGE_VOCABULARY) < usual + LARGEST_RISE
    assert peak_of_a_generation(LARGE_VOCABULARY, lambda: np.zeros(LARGE_VOCABULARY, bool)) > usual + LARGEST_RISE
