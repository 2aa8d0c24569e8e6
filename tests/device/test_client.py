"""The client of the wire: bytes counted exactly, rounds retried, everything else told apart and named."""

import socket
import time
from collections.abc import Iterator
from functools import partial

import msgspec
import numpy as np
import pytest

from hyco_export.device import client as transport_module
from hyco_export.device.backends import Device
from hyco_export.device.client import HttpTransport, Patience
from hyco_export.device.drafters import HybridDrafter
from hyco_export.device.driver import generate
from hyco_export.device.interfaces import Request
from hyco_export.device.systems import SYSTEMS, find_system, make_drafter, make_policy, make_request
from hyco_export.errors import ProtocolError, ServerError, UnreachableError
from hyco_export.protocol import wire
from hyco_export.protocol.server_address import read_url
from hyco_export.server.admission import Facts, Limits
from hyco_export.server.engine import Engine, LocalTransport
from hyco_export.server.http import create_app
from tests.device.test_systems import SETTINGS
from tests.support.live_server import running
from tests.support.raw_server import DROP, HANG, LATE, LATE_S, RawServer, http_answer
from tests.support.scripted import (
    HANDOFF,
    KEEP_ALL,
    STOP_ID,
    VOCAB_SIZE,
    WINDOW,
    ScriptedHead,
    ScriptedSession,
    ScriptedSlm,
    ToyLanguageModel,
    hybrid_of,
)

REPLY = wire.VerifyReply(1, 3, [], [], [5], "", None, 0, 1.0)
VERIFY = wire.VerifyRequest(1, 4, b"12345678", [5, 6], [-1, 0])
PRIME = wire.PrimeRequest(1, [5, 6], wire.Sampling(0.0, 64, 0.95), wire.EXACT, 1, 9, "device", 0, "")
INFO = wire.ServerInfo(1, "test", "v", "t", VOCAB_SIZE, [STOP_ID], "head", "keep", 32, 64, 0, ["exact"], "thread-cpu")
VERDICT = http_answer(wire.encode(REPLY))


class Pauses:
    """Records pauses instead of taking them."""

    def __init__(self) -> None:
        self.taken: list[float] = []

    def __call__(self, seconds: float) -> None:
        self.taken.append(seconds)


def transport_to(url: str, reply_s: float = 5.0) -> tuple[HttpTransport, Pauses]:
    pauses = Pauses()
    return HttpTransport(url, Patience(connect_s=1.0, reply_s=reply_s, pauses_s=(0.0, 0.2, 1.0)), pauses), pauses


def test_a_round_is_one_post_on_a_kept_connection_and_its_bytes_are_counted() -> None:
    with RawServer([VERDICT]) as server:
        transport, pauses = transport_to(server.url)
        for _ in range(3):
            assert transport.verify("se ss/ion", 3, VERIFY) == REPLY
        assert server.connections == 1
        assert pauses.taken == []
        assert server.requests[0].startswith(b"POST /v1/sessions/se%20ss%2Fion/rounds/3 HTTP/1.1\r\n")
        traffic = transport.traffic
        assert (traffic.payload_up_bytes, traffic.payload_down_bytes) == (
            len(wire.encode(VERIFY)), len(wire.encode(REPLY)),
        )  # fmt: skip
        assert (traffic.wire_up_bytes, traffic.wire_down_bytes) == (len(server.requests[-1]), len(VERDICT))


@pytest.mark.parametrize(
    ("header", "padding"), [("000000007", 7), ("9" * 9, None), ("9" * 5_000, 0), ("7", 0), ("-00000007", 0), ("", 0)]
)
def test_padding_is_no_payload_and_a_header_that_lies_breaks_nothing(header: str, padding: int | None) -> None:
    body = wire.encode(REPLY)
    with RawServer([http_answer(body, extra=f"Hyco-Padding: {header}\r\n")]) as server:
        transport, _ = transport_to(server.url)
        assert transport.verify("s", 3, VERIFY) == REPLY
        payload = 0 if padding is None else len(body) - padding  # None: more than the whole body
        assert transport.traffic.payload_down_bytes == payload


def test_a_path_prefix_of_a_proxy_is_kept() -> None:
    with RawServer([http_answer(b"", "204 No Content")]) as server:
        transport, _ = transport_to(server.url + "/hyco/")
        transport.close_session("s")
        assert server.requests[0].startswith(b"DELETE /hyco/v1/sessions/s HTTP/1.1\r\n")


@pytest.mark.parametrize(
    "breaks",
    [
        [DROP],
        [DROP, DROP, DROP],
        [VERDICT[:-3]],  # a body cut short
        [b"garbage that is no HTTP\r\n\r\n"],
        [http_answer(b"<html>bad gateway</html>", "502 Bad Gateway", "text/html")],
    ],
)
def test_a_round_is_sent_again_with_the_same_number(breaks: list[bytes]) -> None:
    with RawServer([*breaks, VERDICT]) as server:
        transport, pauses = transport_to(server.url)
        assert transport.verify("s", 3, VERIFY) == REPLY
        assert len(set(server.requests)) == 1 and len(server.requests) == len(breaks) + 1
        assert pauses.taken == [0.0, 0.2, 1.0][: len(breaks)]
        assert transport.traffic.wire_up_bytes == sum(map(len, server.requests))


def test_a_round_that_gets_no_reply_in_time_is_asked_for_again() -> None:
    with RawServer([HANG, VERDICT]) as server:
        transport, _ = transport_to(server.url, reply_s=0.1)
        assert transport.verify("s", 3, VERIFY) == REPLY
        assert len(server.requests) == 2


def test_a_reply_may_take_longer_than_connecting() -> None:
    with RawServer([LATE + VERDICT]) as server:
        patience = Patience(connect_s=LATE_S / 3, reply_s=5.0, pauses_s=())
        assert HttpTransport(server.url, patience).verify("s", 3, VERIFY) == REPLY


def test_a_round_is_given_up_after_its_tries() -> None:
    with RawServer([DROP]) as server:
        transport, pauses = transport_to(server.url)
        with pytest.raises(ServerError, match=r"no answer from the verifier server at http://127.0.0.1:\d+: .*serve"):
            transport.verify("s", 3, VERIFY)
        assert len(server.requests) == 4
        assert pauses.taken == [0.0, 0.2, 1.0]


def test_priming_is_not_repeated_on_a_fresh_connection() -> None:
    with RawServer([DROP]) as server:
        transport, _ = transport_to(server.url)
        with pytest.raises(ServerError):
            transport.prime(PRIME)
        assert len(server.requests) == 1


def test_a_stale_connection_is_replaced_without_a_pause() -> None:
    primed = wire.PrimeReply(1, "s", 4, 3, "", None, 1.0)
    with RawServer([http_answer(wire.encode(INFO)), http_answer(wire.encode(primed))]) as server:
        transport, pauses = transport_to(server.url)
        assert transport.info() == INFO
        server.close_connections()
        assert transport.prime(PRIME) == primed
        assert server.connections == 2
        assert pauses.taken == []


def test_a_server_that_closes_after_each_answer_is_no_trouble() -> None:
    closing = http_answer(wire.encode(REPLY), extra="Connection: close\r\n")
    with RawServer([closing]) as server:
        transport, pauses = transport_to(server.url)
        assert [transport.verify("s", 3, VERIFY) for _ in range(2)] == [REPLY, REPLY]
        assert server.connections == 2
        assert pauses.taken == []


def test_refusals_are_typed() -> None:
    body = wire.encode(wire.Refusal(1, wire.UNKNOWN_SESSION, "session s is unknown", "prime again"))
    with RawServer([http_answer(body, "404 Not Found")]) as server:
        transport, _ = transport_to(server.url)
        with pytest.raises(ProtocolError, match=r"session s is unknown \(prime again\)") as refusal:
            transport.verify("s", 3, VERIFY)
        assert refusal.value.code == wire.UNKNOWN_SESSION
        assert len(server.requests) == 1


@pytest.mark.parametrize(
    "answer",
    [
        http_answer(b"<html>hello</html>", "200 OK", "text/html"),
        http_answer(b"no such page", "404 Not Found", "text/plain"),
        http_answer(b"", "301 Moved Permanently", "text/html").replace(b"Length: 0", b"Length: 2") + b"up",
        http_answer(b"", "302 Found", "text/html"),
    ],
)
def test_another_server_is_told_from_ours(answer: bytes) -> None:
    with RawServer([answer]) as server:
        transport, _ = transport_to(server.url)
        with pytest.raises(ServerError, match=r"answered \d+ .*not a verifier server's answer \(give the URL"):
            transport.info()


def test_a_silent_server_is_asked_for_its_facts_with_a_limit_of_their_own() -> None:
    with RawServer([HANG]) as server:
        patience = Patience(info_s=0.2, reply_s=60.0)
        with pytest.raises(ServerError, match=r"no answer from the verifier server at .*timed out"):
            HttpTransport(server.url, patience).info()


def test_an_endless_answer_is_refused_by_its_announced_length() -> None:
    announced = http_answer(b"").replace(b"Length: 0", b"Length: 999999999999")
    with RawServer([announced]) as server:
        transport, _ = transport_to(server.url)
        with pytest.raises(ServerError, match="announces an answer of 999,999,999,999 B"):
            transport.info()


class Trickle(RawServer):
    """Sends its answer byte by byte, each one long before any limit."""

    def send(self, connection: socket.socket, answer: bytes) -> None:
        for place in range(len(answer)):
            connection.sendall(answer[place : place + 1])
            if self.end.wait(0.02):
                return


@pytest.mark.parametrize("start", [b"", http_answer(b"x" * 10_000)[:-10_000]])
def test_a_server_that_trickles_is_given_up_by_one_limit_for_the_whole_answer(start: bytes) -> None:
    """In the head, and in the body: each byte comes in time, the answer would take minutes."""
    slow = start + (b"HTTP/1.1 200 OK\r\nX: " if not start else b"") + b"x" * 10_000 + b"\r\n\r\n"
    with Trickle([slow]) as server:
        transport = HttpTransport(server.url, Patience(info_s=0.3, reply_s=0.3, pauses_s=()))
        for call in (transport.info, partial(transport.verify, "s", 3, VERIFY)):
            with pytest.raises(UnreachableError, match=r"no answer from the verifier server at .*timed out"):
                call()
            transport.close()


def test_a_chunked_answer_is_read_up_to_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport_module, "ANSWER_LIMIT_BYTES", 100_000)
    head = f"HTTP/1.1 200 OK\r\nContent-Type: {wire.MEDIA_TYPE}\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
    chunk = b"2710\r\n" + b"\0" * 10_000 + b"\r\n"
    with RawServer([head + 1_000 * chunk]) as server:
        transport, _ = transport_to(server.url)
        with pytest.raises(UnreachableError, match="its answer is larger than 100,000 B"):
            transport.info()
    body = wire.encode(INFO)
    whole = head + f"{len(body):x}\r\n".encode() + body + b"\r\n0\r\n\r\n"
    with RawServer([whole]) as server:
        transport, _ = transport_to(server.url)
        assert [transport.info(), transport.info()] == [INFO, INFO]
        assert server.connections == 1


def test_credentials_in_a_url_are_refused_and_not_repeated() -> None:
    with pytest.raises(ServerError, match="user name or password") as refusal:
        read_url("http://me:secret@host:1")
    assert "secret" not in str(refusal.value)


def test_a_dead_url_fails_within_seconds() -> None:
    with RawServer([VERDICT]) as server:
        url = server.url
    started = time.monotonic()
    with pytest.raises(ServerError, match=r"no answer from the verifier server at .*refused"):
        HttpTransport(url).info()
    assert time.monotonic() - started < 2.0


def test_tls_to_a_plain_server_is_named() -> None:
    with (
        RawServer([VERDICT]) as server,
        pytest.raises(ServerError, match=r"no answer from .* at https"),
    ):
        transport_to(server.url.replace("http:", "https:"), reply_s=1.0)[0].info()


@pytest.mark.parametrize(
    "url", ["127.0.0.1:8000", "ftp://host", "http://", "", "http://host:99999", "http://host:0", "http://[::1"]
)
def test_impossible_urls_are_refused_before_any_call(url: str) -> None:
    with pytest.raises(ServerError, match=r"server URL .*write it like http://127\.0\.0\.1:8411"):
        read_url(url)


# ---------------------------------------------------------------------------------------------- with the real engine

MODEL = ToyLanguageModel(stop_bias=-1e9)
FACTS = Facts(VOCAB_SIZE, frozenset({STOP_ID}), 256, "head", WINDOW, 4, restricts=True)
PROMPT = [5, 9, 2, 7]


def toy_engine() -> Engine:
    return Engine(lambda: ScriptedSession(MODEL), FACTS, Limits(prompt_limit=64))


def hybrid() -> HybridDrafter:
    return hybrid_of(ScriptedHead(MODEL), ScriptedSlm(MODEL, KEEP_ALL))


def request() -> Request:
    return Request("hyco", "p", wire.Sampling(0.0, 64, 0.95), wire.EXACT, 3, 25, head_digest="head")


@pytest.fixture
def served() -> Iterator[tuple[str, Engine]]:
    """URL and engine of a real server in this process."""
    engine = toy_engine()
    with running(create_app(engine, INFO)) as url:
        yield url, engine


def test_http_and_local_transport_generate_the_same(served: tuple[str, Engine]) -> None:
    url, engine = served
    over_http = HttpTransport(url)
    assert over_http.info() == INFO == LocalTransport(engine, INFO).info()
    remote = generate(PROMPT, request(), hybrid(), over_http)
    local = generate(PROMPT, request(), hybrid(), LocalTransport(toy_engine(), INFO))
    assert remote.tokens == local.tokens == tuple(MODEL.answer(PROMPT, 25))
    assert len(remote.rounds) > 3
    for ours, theirs in zip(remote.rounds, local.rounds, strict=True):
        assert (ours.tree, ours.accepted, ours.tokens) == (theirs.tree, theirs.accepted, theirs.tokens)
        assert ours.traffic.payload_up_bytes == theirs.traffic.payload_up_bytes <= 300
        rows = 0 if ours.finished else 1 + len(ours.accepted)
        payload = 0 if ours.finished else HANDOFF.round_bytes + HANDOFF.row_bytes * rows
        assert payload <= ours.traffic.payload_down_bytes <= payload + 100
        assert ours.traffic.wire_down_bytes > ours.traffic.payload_down_bytes
    assert engine.session_count == 0


@pytest.mark.parametrize("name", list(SYSTEMS))
def test_every_system_runs_over_http(served: tuple[str, Engine], name: str) -> None:
    url, engine = served
    system, settings = find_system(name), msgspec.structs.replace(SETTINGS, trace=True)
    keep = np.arange(VOCAB_SIZE)
    device = Device(ScriptedHead(MODEL), ScriptedSlm(MODEL, keep), HANDOFF, keep)
    drafter, policy = make_drafter(system, settings, device), make_policy(system, settings)
    asked = make_request(system, settings, "p", wire.Sampling(0.0, 64, 0.95), 3, 40)
    trace = generate(PROMPT, asked, drafter, HttpTransport(url), policy=policy)
    assert trace.tokens == tuple(MODEL.answer(PROMPT, 40))
    assert all(entry.evidence is not None for entry in trace.rounds)
    assert bool(trace.rounds) == system.asks
    assert engine.session_count == 0


def test_a_server_restart_in_the_middle_changes_no_token(served: tuple[str, Engine]) -> None:
    url, engine = served

    class Restarting(HttpTransport):
        def verify(self, session: str, round_number: int, request: wire.VerifyRequest) -> wire.VerifyReply:
            if round_number == 2:
                for name in engine.held():
                    engine.close(name)
            return super().verify(session, round_number, request)

    trace = generate(PROMPT, request(), hybrid(), Restarting(url))
    assert trace.tokens == tuple(MODEL.answer(PROMPT, 25))
    assert len(trace.primes) > 1


def test_local_refusals_are_typed_like_remote_ones(served: tuple[str, Engine]) -> None:
    url, engine = served
    wrong = msgspec.structs.replace(PRIME, prompt=[VOCAB_SIZE])
    seen = []
    for transport in (HttpTransport(url), LocalTransport(engine, INFO)):
        with pytest.raises(ProtocolError) as refusal:
            transport.prime(wrong)
        seen.append((refusal.value.code, refusal.value.message, refusal.value.hint))
        transport.close_session("nobody")  # closing what is not there is no error
    assert seen[0] == seen[1]
    assert seen[0][0] == "token_range"
