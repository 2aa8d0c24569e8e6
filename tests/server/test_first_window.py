"""The first window in parts: the same rows in the end, the same text, the same part for a repeated round."""

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hyco_export.core.handoff import LAYER_TYPES, KvRows
from hyco_export.device.driver import generate
from hyco_export.device.head import GraphHead
from hyco_export.device.interfaces import Given, Request
from hyco_export.device.kv_state import HeadState
from hyco_export.errors import ProtocolError
from hyco_export.protocol import wire
from hyco_export.protocol.security import ANYBODY
from hyco_export.server.admission import Limits
from hyco_export.server.engine import Engine, LocalTransport
from hyco_export.server.first_window import split_window
from tests.support.scripted import (
    FACTS,
    HANDOFF,
    INFO,
    KEEP_ALL,
    VOCAB_SIZE,
    WINDOW,
    ScriptedHead,
    ScriptedSession,
    ScriptedSlm,
    ToyLanguageModel,
    hybrid_of,
)
from tests.support.toy_graphs import KEEP_IDS, toy_head_spec

MODEL = ToyLanguageModel(seed=5, stop_bias=-1e9)
ROW_BYTES = HANDOFF.row_bytes


def toy_engine() -> Engine:
    return Engine(lambda: ScriptedSession(MODEL), FACTS, Limits(prompt_limit=64))


def prime_request(prompt: list[int], first_rows: int) -> wire.PrimeRequest:
    return wire.PrimeRequest(
        1, prompt, wire.Sampling(0.0, 64, 0.95), wire.EXACT, 1, 40, "device", 0, "head", first_rows=first_rows
    )


@given(count=st.integers(1, 40), first_rows=st.integers(0, 45), first=st.integers(0, 50))
def test_parts_are_the_window_newest_first(count: int, first_rows: int, first: int) -> None:
    kv = np.arange(count * 3, dtype=np.uint8).tobytes()  # 3 B a row
    reply = wire.PrimeReply(1, "s", 4, first + count + 1, "", wire.Handoff(b"e", b"h", kv, first), 1.0)
    newest, older = split_window(reply, first_rows)
    assert newest.handoff is not None
    if first_rows == 0 or first_rows >= count:
        assert newest == reply and older is None
        return
    assert older is not None
    assert len(newest.handoff.kv) == 3 * first_rows and newest.handoff.first_position == first + count - first_rows
    found, oldest = newest.handoff.kv, newest.handoff.first_position
    bare = wire.Handoff(b"e", b"h", b"", 0)
    for number in range(1, older.parts + 1):
        part = older.attach(bare, number)
        assert 0 < len(part.older_kv) <= 3 * first_rows
        assert part.older_first + len(part.older_kv) // 3 == oldest
        found, oldest = part.older_kv + found, part.older_first
    assert (found, oldest) == (kv, first)
    assert older.attach(bare, older.parts + 1) == bare


@settings(max_examples=40, deadline=None)
@given(
    prompt=st.lists(st.integers(2, VOCAB_SIZE - 1), min_size=1, max_size=20),
    first_rows=st.integers(1, 10),
    error_every=st.integers(1, 5),
)
def test_text_and_the_ring_in_the_end_are_those_of_the_whole_window(
    prompt: list[int], first_rows: int, error_every: int
) -> None:
    for rows in (0, first_rows):
        head, slm = ScriptedHead(MODEL, error_every=error_every), ScriptedSlm(MODEL, KEEP_ALL)
        drafter = hybrid_of(head, slm)
        request = Request(
            "hyco", "p", wire.Sampling(0.0, 64, 0.95), wire.EXACT, 3, 60, head_digest="head", first_rows=rows
        )
        trace = generate(prompt, request, drafter, LocalTransport(toy_engine(), INFO))
        assert list(trace.tokens) == MODEL.answer(prompt, 60)
        committed = [*prompt, *trace.tokens]
        assert all(committed[position] == token for position, token in head.tokens.items())
        end = max(head.tokens) + 1
        assert set(range(max(0, end - WINDOW), end)) <= set(head.tokens)  # the window is whole
        window_bytes = ROW_BYTES * min(len(prompt), WINDOW)
        sent = trace.primes[0].traffic.payload_down_bytes + sum(entry.older_bytes for entry in trace.rounds)
        assert sent >= window_bytes  # nothing was left out
        if rows and rows < min(len(prompt), WINDOW):
            assert trace.primes[0].traffic.payload_down_bytes < window_bytes - ROW_BYTES * rows + 120
            assert trace.rounds[0].older_bytes > 0


def test_a_repeated_round_carries_the_same_part_and_the_window_is_freed_after_the_last() -> None:
    engine = toy_engine()
    prompt = list(range(2, 2 + WINDOW))
    reply = engine.prime(prime_request(prompt, 3))
    ids = [*prompt, reply.root]
    sizes = []
    for number in range(1, 6):
        message = wire.VerifyRequest(1, len(ids), wire.committed_digest(ids), [], [])
        first = engine.verify(reply.session, number, message)
        assert engine.verify(reply.session, number, message) == first
        assert first.handoff is not None
        sizes.append(len(first.handoff.older_kv) // ROW_BYTES)
        ids += first.tokens
    assert sizes == [3, 2, 0, 0, 0]  # 3 of 8 came with the first reply
    assert engine._table.find(reply.session, ANYBODY).older is None


def test_a_negative_number_of_rows_is_refused() -> None:
    with pytest.raises(ProtocolError, match=r"first_rows is -1, it must be 0 \(whole window\) or more") as refusal:
        toy_engine().prime(prime_request([5, 6], -1))
    assert refusal.value.code == "value_range"


@pytest.mark.parametrize(
    "changes", [{"older_kv": bytes(ROW_BYTES + 1)}, {"older_first": 1}, {"older_kv": bytes(3 * ROW_BYTES)}]
)
def test_older_rows_that_do_not_fit_are_refused(changes: dict[str, object]) -> None:
    session = ScriptedSession(MODEL)
    session.prime(np.array([5, 6, 7, 8]))
    feed = HeadState(ScriptedHead(MODEL), HANDOFF)
    newest = session.handoff(9, 2)
    feed.begin([5, 6, 7, 8, 9], Given(newest))
    session.verify(9, np.zeros(0, np.int64), np.zeros(0, np.int64))
    session.commit(())
    right = msgspec.structs.replace(session.handoff(3, 1), older_kv=bytes(2 * ROW_BYTES), older_first=0)
    with pytest.raises(ProtocolError) as refusal:
        feed.observe([5, 6, 7, 8, 9, 3], Given(msgspec.structs.replace(right, **changes)))
    assert refusal.value.code == "handoff_gap"


class Feeds:
    """A session that keeps what it was fed."""

    def __init__(self, chain: int) -> None:
        self.feeds: dict[str, np.ndarray] = {}
        self._chain = chain

    def run(self, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        self.feeds = {name: values.copy() for name, values in feeds.items()}
        return {"chain": np.zeros(self._chain, np.int64)}

    def close(self) -> None:
        pass


@pytest.mark.parametrize("root", [5, 8, 9, 13, 21])
@pytest.mark.parametrize("newest", [1, 3, 4])
def test_the_graph_is_fed_the_same_whichever_part_came_first(root: int, newest: int) -> None:
    spec = toy_head_spec(WINDOW, {"sliding": 6, "full": None})
    generator = np.random.default_rng(root)
    first = max(0, root - WINDOW)
    shape = (root - first, 1, 2)
    k, v = ({t: generator.integers(0, 256, shape).astype(np.uint8) for t in LAYER_TYPES} for _ in "kv")

    def rows(start: int, end: int) -> KvRows:
        return KvRows({t: k[t][start:end] for t in LAYER_TYPES}, {t: v[t][start:end] for t in LAYER_TYPES})

    fed = []
    for order in ("whole", "newest first"):
        session = Feeds(4)
        head = GraphHead(spec, KEEP_IDS, session)
        cut = root - first - newest
        if order == "whole":
            head.commit(rows(0, root - first), first)
        else:
            head.commit(rows(cut, root - first), first + cut)
            head.commit(rows(1, cut), first + 1)
            head.commit(rows(0, 1), first)
        head.draft(np.zeros(spec.handoff.hidden, np.uint8), np.zeros(spec.handoff.hidden, np.uint8), root)
        fed.append(session.feeds)
    assert set(fed[0]) == set(fed[1])
    for name, values in fed[0].items():
        assert np.array_equal(values, fed[1][name]), name
