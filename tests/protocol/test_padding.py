"""Padded replies: exact sizes, the same message, and the cost counted on both sides."""

import urllib.request

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hyco_export.device.client import HttpTransport
from hyco_export.device.driver import generate
from hyco_export.device.interfaces import Request
from hyco_export.protocol import wire
from hyco_export.protocol.wire import BIN32_HEADER_BYTES, pad, padded_size
from hyco_export.server.admission import Limits
from hyco_export.server.engine import Engine
from hyco_export.server.http import create_app
from tests.support.live_server import running
from tests.support.oracle import OracleDrafter
from tests.support.scripted import FACTS, HANDOFF, INFO, ScriptedSession, ToyLanguageModel

MODEL = ToyLanguageModel(stop_bias=-1e9)
PROMPT = [5, 6, 7, 8]
STEP = 512


@given(kv_bytes=st.integers(0, 3000), step=st.integers(6, 4096), tokens=st.lists(st.integers(0, 1 << 30), max_size=40))
def test_a_padded_reply_is_the_next_multiple_and_reads_the_same(kv_bytes: int, step: int, tokens: list[int]) -> None:
    handoff = wire.Handoff(b"e", b"h", bytes(kv_bytes), 3)
    reply = wire.VerifyReply(1, 3, [0], [True], tokens, "", handoff, 0, 1.5)
    body = wire.encode(reply)
    padded = pad(body, step)
    assert len(padded) % step == 0 and len(padded) == padded_size(len(body), step)
    assert 0 <= len(padded) - len(body) - BIN32_HEADER_BYTES < step
    assert wire.decode(padded, wire.VerifyReply) == reply
    assert msgspec.msgpack.decode(padded)[-1] == bytes(len(padded) - len(body) - BIN32_HEADER_BYTES)


def test_only_arrays_with_room_can_be_padded() -> None:
    for body in (wire.encode(INFO), msgspec.msgpack.encode(list(range(15))), b"\xc0"):
        with pytest.raises(ValueError, match="no array with room"):
            pad(body, 64)


def texts_and_sizes(pad_bytes: int) -> tuple[tuple[int, ...], set[int], list[int], str]:
    """Tokens, sizes on the wire of the rounds' replies, their payloads, and the server's metrics."""
    engine = Engine(lambda: ScriptedSession(MODEL), FACTS, Limits(prompt_limit=64))
    app = create_app(engine, INFO, pad_bytes=pad_bytes)
    # the oracle runs dry at times: rounds commit different numbers of tokens
    drafter = OracleDrafter(lambda ids, depth: MODEL.greedy(ids, ids[-1] % (depth + 1)), 5)
    request = Request("oracle", "p", wire.Sampling(0.0, 64, 0.95), wire.EXACT, 3, 40, head_digest="head")
    with running(app) as url:
        transport = HttpTransport(url)
        trace = generate(PROMPT, request, drafter, transport)
        metrics = urllib.request.urlopen(f"{url}/metrics").read().decode()
    wire_sizes = {entry.traffic.wire_down_bytes for entry in trace.rounds}
    return trace.tokens, wire_sizes, [entry.traffic.payload_down_bytes for entry in trace.rounds], metrics


def test_over_http_all_replies_have_one_size_and_the_cost_is_counted() -> None:
    tokens, sizes, payloads, _ = texts_and_sizes(0)
    padded_tokens, padded_sizes, padded_payloads, metrics = texts_and_sizes(STEP)
    assert padded_tokens == tokens
    assert len(sizes) >= 4 and max(payloads) + BIN32_HEADER_BYTES <= STEP
    assert len(padded_sizes) == 1  # headers included
    assert padded_payloads == payloads  # what padding adds is no payload
    replies = len(payloads) + 1
    counted = float(
        next(line for line in metrics.splitlines() if line.startswith("hyco_padding_bytes_total")).split()[1]
    )
    prime_payload = HANDOFF.round_bytes + HANDOFF.row_bytes * len(PROMPT)
    assert (
        replies * STEP - sum(payloads) - prime_payload - 100 < counted < replies * STEP - sum(payloads) - prime_payload
    )
