"""Peers that are slow, large or many: each is cut off by its own limit, and the server goes on."""

import asyncio
import errno
import gc
import socket
import threading
import time
from contextlib import closing, suppress
from pathlib import Path

import msgspec
import numpy as np
import pytest
import trustme
from starlette.applications import Starlette
from starlette.responses import Response
from starlette.routing import Route

from hyco_export.device.client import HttpTransport, Patience
from hyco_export.protocol import wire
from hyco_export.protocol.security import Tokens, server_context
from hyco_export.server import serving
from hyco_export.server.admission import Batching
from hyco_export.server.connections import LimitedProtocol, PeerLimits
from hyco_export.server.engine import Engine
from hyco_export.server.http import CallLimits, create_app
from tests.support.live_server import LiveServer, running
from tests.support.scripted import ScriptedSession
from tests.support.toy_service import ALICE, FACTS, INFO, LIMITS, MODEL, PRIME, toy_engine

SHORT_S = 0.3
PEERS = PeerLimits(connections=3, head_bytes=1_000, head_s=SHORT_S, stall_s=SHORT_S)


def connected(url: str) -> socket.socket:
    host, port = url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=10)


def received(peer: socket.socket, until: bytes | None = None) -> bytes:
    """All until it ends with these bytes or the server closes."""
    answer = bytearray()
    with suppress(ConnectionError):
        while part := peer.recv(65_536):
            answer += part
            if until is not None and answer.endswith(until):
                break
    return bytes(answer)


def app(body_s: float = SHORT_S) -> Starlette:
    return create_app(toy_engine(), INFO, calls=CallLimits(body_s=body_s))


def refusal_in(answer: bytes) -> wire.Refusal:
    return wire.decode(answer.split(b"\r\n\r\n", 1)[1], wire.Refusal)


def test_a_head_that_never_ends_is_cut_off() -> None:
    with running(app(), peers=PEERS) as url, closing(connected(url)) as silent, closing(connected(url)) as slow:
        slow.sendall(b"GET /v1/info HT")
        assert received(slow) == received(silent) == b""
        assert HttpTransport(url).info() == INFO


def test_a_second_head_on_a_kept_connection_is_cut_off_too() -> None:
    with running(app(), peers=PEERS) as url, closing(connected(url)) as peer:
        peer.sendall(b"GET /healthz HTTP/1.1\r\nHost: h\r\n\r\n")
        assert received(peer, b"alive\n").startswith(b"HTTP/1.1 200")
        time.sleep(2 * SHORT_S)  # between two calls nobody hurries
        peer.sendall(b"GET /healthz HTTP/1.1\r\n")
        assert received(peer) == b""


def test_a_request_of_two_lengths_is_refused_and_its_connection_ends() -> None:
    head = b"POST /v1/sessions HTTP/1.1\r\nHost: h\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n"
    with running(app(), peers=PEERS) as url, closing(connected(url)) as peer:
        peer.sendall(head + b"0\r\n\r\nGET /v1/info HTTP/1.1\r\nHost: h\r\n\r\n")
        answer = received(peer)
        assert answer.startswith(b"HTTP/1.1 400") and answer.count(b"HTTP/1.1") == 1
        assert "two lengths" in refusal_in(answer).message


def test_a_body_that_never_ends_is_refused() -> None:
    with running(app(), peers=PEERS) as url, closing(connected(url)) as peer:
        peer.sendall(b"POST /v1/sessions HTTP/1.1\r\nHost: h\r\nContent-Length: 100\r\n\r\n\x9a")
        answer = received(peer)
        assert answer.startswith(b"HTTP/1.1 408")
        assert refusal_in(answer).message == "the body took longer than 0.3 s"


def test_large_heads_are_refused_before_they_are_whole() -> None:
    with running(app(), peers=PEERS) as url, closing(connected(url)) as peer:
        peer.sendall(b"GET /v1/info HTTP/1.1\r\nHost: h\r\nX: " + b"x" * 3 * PEERS.head_bytes)
        answer = received(peer)
        assert answer.startswith(b"HTTP/1.1 400") and refusal_in(answer).code == "malformed"
        assert HttpTransport(url).info() == INFO


@pytest.mark.parametrize("first", [0, 1, PEERS.head_bytes // 2, PEERS.head_bytes])
def test_large_heads_are_refused_when_they_come_whole_too(first: int) -> None:
    head = b"GET /v1/info HTTP/1.1\r\nHost: h\r\nX: " + b"x" * PEERS.head_bytes + b"\r\n\r\n"
    with running(app(), peers=PEERS) as url, closing(connected(url)) as peer:
        peer.sendall(head[:first])
        time.sleep(SHORT_S / 10)
        peer.sendall(head[first:])
        answer = received(peer)
        assert answer.startswith(b"HTTP/1.1 400") and refusal_in(answer).code == "malformed"


def test_a_body_behind_its_head_may_be_as_large_as_its_call_takes() -> None:
    body = wire.encode(wire.VerifyRequest(1, 5, b"12345678", [2] * 60, [-1] * 60, [4] * 300))
    assert len(body) < 1_664  # what a VERIFY takes, and more than a head
    head = f"POST /v1/sessions/x/rounds/1 HTTP/1.1\r\nHost: h\r\nContent-Type: {wire.MEDIA_TYPE}\r\n"
    with running(app(), peers=PEERS) as url, closing(connected(url)) as peer:
        for padding in (0, 700):
            lines = f"X: {'x' * padding}\r\nContent-Length: {len(body)}\r\n\r\n"
            peer.sendall((head + lines).encode() + body)
            answer = received(peer, b"ids\x00")
            assert answer.startswith(b"HTTP/1.1 404") and refusal_in(answer).code == "unknown_session"


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",  # the beginning of TLS
        b"POST /v1/sessions HTTP/1.1\r\nHost: h\r\nContent-Length: -1\r\n\r\n",
        b"POST /v1/sessions HTTP/1.1\r\nHost: h\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
        b"GET /v1/info HTTP/1.1\r\n\r\n",  # no Host
    ],
)
def test_what_is_no_request_gets_a_typed_refusal(sent: bytes, capfd: pytest.CaptureFixture[str]) -> None:
    with running(app(), peers=PEERS) as url, closing(connected(url)) as peer:
        peer.sendall(sent)
        answer = received(peer)
        assert answer.startswith(b"HTTP/1.1 400 Bad Request\r\n") and b"Connection: close" in answer
        assert refusal_in(answer).code == "malformed"
        assert HttpTransport(url).info() == INFO
    assert capfd.readouterr().err == ""  # nobody fills the log with such


def test_an_endless_body_is_left_unread() -> None:
    with running(app(body_s=30.0), peers=PEERS) as url, closing(connected(url)) as peer:
        peer.sendall(b"POST /v1/sessions HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n")
        sent = 0
        chunk = b"10000\r\n" + b"\0" * 65_536 + b"\r\n"
        with suppress(OSError):
            while sent < 1 << 28:
                peer.sendall(chunk)
                sent += len(chunk)
        assert sent < 1 << 24  # the limit, what lingers, and what the sockets hold
        assert HttpTransport(url).info() == INFO


def test_a_body_a_little_too_large_hears_why() -> None:
    with running(app(body_s=30.0), peers=PEERS) as url, closing(connected(url)) as peer:
        body = b"\0" * 500_000
        peer.sendall(b"POST /v1/sessions HTTP/1.1\r\nHost: h\r\nContent-Length: 500000\r\n\r\n" + body)
        assert received(peer, b"call takes\xa0\x00").startswith(b"HTTP/1.1 413")  # an empty hint, no wait
        peer.sendall(b"GET /healthz HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n")
        assert b"alive" in received(peer)


def test_one_connection_too_many_is_told_so_and_the_others_stay() -> None:
    with running(app(body_s=30.0), peers=msgspec.structs.replace(PEERS, head_s=30.0)) as url:
        first = [connected(url) for _ in range(PEERS.connections)]
        for peer in first:
            peer.sendall(b"POST /v1/sessions HTTP/1.1\r\nHost: h\r\nContent-Length: 2\r\n\r\n\x9a")
        time.sleep(SHORT_S)  # their requests are in progress
        with closing(connected(url)) as one_more:
            answer = received(one_more)
        assert answer.startswith(b"HTTP/1.1 503") and b"\r\nRetry-After: 1\r\n" in answer
        refusal = refusal_in(answer)
        assert (refusal.code, refusal.retry_after_s) == ("connections_full", 1)
        for peer in first:
            peer.sendall(b"\x9a")
            assert peer.recv(65_536).startswith(b"HTTP/1.1 415")
            peer.close()
        patience = Patience(pauses_s=())
        assert HttpTransport(url, patience, pause=lambda _: time.sleep(0.05)).info() == INFO  # it tries again


def test_a_reader_that_does_not_read_is_cut_off() -> None:
    size = 1 << 26  # more than the sockets hold

    async def large(_: object) -> Response:
        return Response(b"\0" * size)

    with running(Starlette(routes=[Route("/", large)]), peers=PEERS) as url, closing(connected(url)) as peer:
        peer.sendall(b"GET / HTTP/1.1\r\nHost: h\r\n\r\n")
        time.sleep(5 * SHORT_S)  # reads nothing for longer than is given
        assert len(received(peer)) < size


def test_a_slow_reader_that_reads_gets_everything() -> None:
    size = 1 << 24

    async def large(_: object) -> Response:
        return Response(b"\0" * size)

    with running(Starlette(routes=[Route("/", large)]), peers=PEERS) as url, closing(connected(url)) as peer:
        peer.sendall(b"GET / HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n")
        got = 0
        while part := peer.recv(1 << 20):
            got += len(part)
            time.sleep(SHORT_S / 10)
        assert got > size


CRUMBS = msgspec.structs.replace(PEERS, body_pieces=20, head_s=30.0)
CHUNKED = b"Host: h\r\nTransfer-Encoding: chunked\r\n\r\n"
CRUMB = b"1\r\nx\r\n"
HEALTHY = b"GET /healthz HTTP/1.1\r\nHost: h\r\n\r\n"


@pytest.mark.parametrize(
    ("line", "status"),
    [
        (b"POST /v1/sessions", b"400"),
        (b"GET /healthz", b"200"),
        (b"POST /nothing", b"404"),
        (b"PUT /v1/sessions", b"405"),
        (b"GET /v1/info", b"200"),
    ],
)
def test_a_body_in_crumbs_ends_its_connection(line: bytes, status: bytes) -> None:
    with running(app(body_s=30.0), peers=CRUMBS) as url, closing(connected(url)) as peer:
        peer.sendall(line + b" HTTP/1.1\r\n" + CHUNKED)
        time.sleep(SHORT_S)  # what reads no body has answered
        peer.sendall(CRUMB * (CRUMBS.body_pieces + 1))
        answer = received(peer)  # to its end: the server closes
        assert answer.startswith(b"HTTP/1.1 " + status) and answer.count(b"HTTP/1.1") == 1
        assert HttpTransport(url).info() == INFO


def test_crumbs_within_the_limit_are_a_body_and_its_connection_goes_on() -> None:
    with running(app(body_s=30.0), peers=CRUMBS) as url, closing(connected(url)) as peer:
        for _ in range(3):  # each body is counted by itself
            peer.sendall(b"GET /healthz HTTP/1.1\r\n" + CHUNKED + CRUMB * (CRUMBS.body_pieces - 5) + b"0\r\n\r\n")
            assert received(peer, b"alive\n").startswith(b"HTTP/1.1 200")


def test_a_body_that_nobody_reads_must_end_in_time() -> None:
    with running(app(body_s=30.0), peers=PEERS) as url, closing(connected(url)) as peer:
        peer.sendall(b"GET /healthz HTTP/1.1\r\nHost: h\r\nContent-Length: 9\r\n\r\n")
        assert received(peer).endswith(b"alive\n")  # and the end of the connection


def test_a_large_head_is_refused_behind_another_request_too() -> None:
    large = b"GET /healthz HTTP/1.1\r\nHost: h\r\n" + b"a:b\r\n" * PEERS.head_bytes + b"\r\n"
    with running(app(), peers=PEERS) as url, closing(connected(url)) as peer:
        peer.sendall(HEALTHY + large)
        answer = received(peer)
        assert answer.startswith(b"HTTP/1.1 200") and answer.count(b"alive") == 1
        assert b"HTTP/1.1 400" in answer


def test_requests_that_come_at_once_are_answered_in_turn() -> None:
    with running(app(), peers=msgspec.structs.replace(PEERS, head_s=30.0)) as url, closing(connected(url)) as peer:
        peer.sendall(HEALTHY * 200)
        peer.shutdown(socket.SHUT_WR)
        assert received(peer).count(b"alive\n") == 200


def test_what_follows_a_last_request_does_not_cost_its_answer() -> None:
    with running(app(), peers=PEERS) as url, closing(connected(url)) as peer:
        peer.sendall(b"GET /healthz HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n\r\nrest")
        answer = received(peer)
        assert answer.startswith(b"HTTP/1.1 200") and answer.endswith(b"alive\n")


@pytest.mark.parametrize("target", [b"http://other.example:80/healthz", b"HTTPS://h/healthz?x=1"])
def test_targets_in_absolute_form_are_understood(target: bytes) -> None:
    with running(app(), peers=PEERS) as url, closing(connected(url)) as peer:
        peer.sendall(b"GET " + target + b" HTTP/1.1\r\nHost: h\r\n\r\n")
        assert received(peer, b"alive\n").startswith(b"HTTP/1.1 200")


def test_a_peer_that_only_listens_on_gets_its_answer() -> None:
    with running(app(), peers=PEERS) as url, closing(connected(url)) as peer:
        body = wire.encode(PRIME)
        head = f"POST /v1/sessions HTTP/1.1\r\nHost: h\r\nContent-Type: {wire.MEDIA_TYPE}\r\n"
        peer.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        peer.shutdown(socket.SHUT_WR)
        answer = received(peer)
        assert answer.startswith(b"HTTP/1.1 200")
        assert wire.decode(answer.split(b"\r\n\r\n", 1)[1], wire.PrimeReply).length == len(PRIME.prompt) + 1


def test_a_client_can_ask_how_far_a_prompt_is() -> None:
    processed, seen = 0, []

    class Asked(ScriptedSession):
        def prime(self, ids: np.ndarray) -> np.ndarray:
            nonlocal processed
            seen.append((HttpTransport(url).prefilled(), processed))
            processed += len(ids)
            return super().prime(ids)

    engine = Engine(lambda: Asked(MODEL), FACTS, LIMITS, batching=Batching(prefill_rows=4))
    with running(create_app(engine, INFO), peers=PEERS) as url:
        HttpTransport(url).prime(msgspec.structs.replace(PRIME, prompt=[4] * 10))
        assert seen == [(0, 0), (4, 4), (8, 8)]
        asking = HttpTransport(url)
        assert asking.prefilled() == 0  # it has its first token
        assert asking.info() == INFO  # other calls take no plain text


@pytest.mark.parametrize("gone", [False, True])
def test_a_peer_that_only_listens_is_told_from_one_that_is_gone(gone: bool) -> None:
    entered = threading.Event()

    class Slow(ScriptedSession):
        def prime(self, ids: np.ndarray) -> np.ndarray:
            entered.set()
            time.sleep(0.05)
            return super().prime(ids)

    engine = Engine(lambda: Slow(MODEL), FACTS, LIMITS, batching=Batching(prefill_rows=1))
    body = wire.encode(msgspec.structs.replace(PRIME, prompt=[4] * 100))  # 5 s of passes
    head = f"POST /v1/sessions HTTP/1.1\r\nHost: h\r\nContent-Type: {wire.MEDIA_TYPE}\r\n"
    with running(create_app(engine, INFO), peers=PEERS) as url, closing(connected(url)) as peer:
        peer.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        assert entered.wait(timeout=30)
        if gone:
            peer.close()
            deadline_s = time.monotonic() + 30
            while engine.session_count:  # its session is freed: nobody knows its name
                assert time.monotonic() < deadline_s
                time.sleep(0.01)
            return
        peer.shutdown(socket.SHUT_WR)
        answer = received(peer)
        assert answer.startswith(b"HTTP/1.1 100 Continue\r\n\r\n")
        assert b"HTTP/1.1 200" in answer and engine.session_count == 1


def test_a_silent_peer_gives_its_place_to_a_new_one() -> None:
    with running(app(), peers=msgspec.structs.replace(PEERS, head_s=30.0)) as url:
        silent = [connected(url) for _ in range(3 * PEERS.connections)]
        assert HttpTransport(url).info() == INFO
        assert received(silent[0]) == b""
        for peer in silent:
            peer.close()


def test_within_descriptors(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    held = [(100, 4_096)]
    monkeypatch.setattr(serving.resource, "getrlimit", lambda _: held[-1])
    monkeypatch.setattr(serving.resource, "setrlimit", lambda _, limits: held.append(limits))
    assert serving.within_descriptors(PeerLimits()) == PeerLimits()
    assert PeerLimits().connections + PeerLimits().backlog < held[-1][0] < 4_096 and not caplog.records
    held.append((100, 400))
    fewer = serving.within_descriptors(PeerLimits()).connections
    assert 1 <= fewer < 400 - PeerLimits().backlog and held[-1] == (400, 400)
    assert len(caplog.records) == 1 and "400 files: raise ulimit -n" in caplog.records[0].getMessage()


def test_descriptors_that_run_out_are_said_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    server = serving.AnnouncingServer(serving.configure(app()), lambda: None)
    loop = asyncio.new_event_loop()
    for _ in range(1_000):
        server._loop_error(loop, {"message": "accept", "exception": OSError(errno.EMFILE, "Too many open files")})
    loop.close()
    assert [record.getMessage() for record in caplog.records] == [
        "a connection cannot be accepted: Too many open files; raise ulimit -n"
    ]


def primed(url: str, token: str = "") -> socket.socket:
    """A kept connection by which a session was opened."""
    peer, body = connected(url), wire.encode(PRIME)
    key = f"Authorization: Bearer {token}\r\n" if token else ""
    head = f"POST /v1/sessions HTTP/1.1\r\nHost: h\r\n{key}Content-Type: {wire.MEDIA_TYPE}\r\n"
    peer.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    assert received(peer, b"\x90").startswith(b"HTTP/1.1 200")  # the reply's last field is an empty list
    return peer


@pytest.mark.parametrize("token", ["", ALICE])
def test_idle_connections_that_asked_a_free_question_lock_nobody_out(token: str) -> None:
    service = create_app(toy_engine(), INFO, Tokens([token] if token else []))
    with running(service, peers=msgspec.structs.replace(PEERS, head_s=30.0)) as url:
        device = primed(url, token)
        idle = []
        for _ in range(2 * PEERS.connections):
            peer = connected(url)
            peer.sendall(HEALTHY)
            assert received(peer, b"alive\n").startswith(b"HTTP/1.1 200")  # a newcomer has a place
            idle.append(peer)
        device.sendall(HEALTHY)
        assert received(device, b"alive\n").startswith(b"HTTP/1.1 200")  # who idles longest, but is known, kept his
        assert received(idle[0]) == b""
        for peer in (device, *idle):
            peer.close()


def test_connections_of_devices_give_their_places_when_no_other_is_left() -> None:
    with running(app(), peers=msgspec.structs.replace(PEERS, head_s=30.0)) as url:
        devices = [primed(url) for _ in range(PEERS.connections + 1)]
        assert received(devices[0]) == b""
        for device in devices:
            device.close()


def test_a_failed_handshake_leaves_nothing_behind(tmp_path: Path) -> None:
    leaf = trustme.CA().issue_cert("127.0.0.1")
    leaf.private_key_and_cert_chain_pem.write_to_path(tmp_path / "both.pem")
    tls = server_context(tmp_path / "both.pem", tmp_path / "both.pem")

    def held() -> int:
        return sum(isinstance(found, LimitedProtocol) for found in gc.get_objects())

    with running(app(), tls=tls, peers=PEERS) as url:
        gc.collect()
        gc.disable()
        try:
            before = held()
            for _ in range(5):
                with closing(connected(url.replace("https", "http"))) as peer:
                    peer.sendall(b"no TLS at all\r\n\r\n")
                    received(peer)
            deadline_s = time.monotonic() + 10
            while held() > before and time.monotonic() < deadline_s:
                time.sleep(0.05)
            assert held() == before
        finally:
            gc.enable()


@pytest.mark.parametrize("path", ["/v1/sessions", "/v1/sessions/x/rounds/1"])
def test_a_body_that_is_too_large_hears_so_however_many_packets_bring_it(path: str) -> None:
    peers = msgspec.structs.replace(PEERS, head_bytes=8_192, body_pieces=20, head_s=30.0)
    with running(app(body_s=30.0), peers=peers) as url, closing(connected(url)) as peer:
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        head = f"POST {path} HTTP/1.1\r\nHost: h\r\nContent-Type: {wire.MEDIA_TYPE}\r\nContent-Length: 90000\r\n\r\n"
        peer.sendall(head.encode())
        for _ in range(60):
            peer.sendall(b"x" * 1_500)
            time.sleep(0.001)
        answer = received(peer, b"call takes\xa0\x00")
        assert answer.startswith(b"HTTP/1.1 413") and refusal_in(answer).code == "body_size"


def test_a_body_in_crumbs_hears_why_it_was_refused() -> None:
    with running(app(body_s=30.0), peers=CRUMBS) as url, closing(connected(url)) as peer:
        peer.sendall(b"POST /v1/sessions HTTP/1.1\r\n" + CHUNKED + CRUMB * (CRUMBS.body_pieces + 1))
        refusal = refusal_in(received(peer))
        assert refusal.message == "a body of more than 20 chunks or packets, of 1 B on average"
        assert "20 chunks or packets" in refusal.hint


def test_a_peer_that_closed_its_half_is_probed_for_every_request_it_sent() -> None:
    entered = threading.Semaphore(0)

    class Slow(ScriptedSession):
        def prime(self, ids: np.ndarray) -> np.ndarray:
            entered.release()
            time.sleep(1.5)
            return super().prime(ids)

    body = wire.encode(PRIME)
    head = f"POST /v1/sessions HTTP/1.1\r\nHost: h\r\nContent-Type: {wire.MEDIA_TYPE}\r\n"
    request = f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
    peers = msgspec.structs.replace(PEERS, head_s=30.0)
    app_of_slow = create_app(Engine(lambda: Slow(MODEL), FACTS, LIMITS), INFO)
    with running(app_of_slow, peers=peers) as url, closing(connected(url)) as peer:
        peer.sendall(2 * request)
        peer.shutdown(socket.SHUT_WR)
        answer = received(peer)
        first, second = answer.split(b"HTTP/1.1 200", 2)[:2]
        assert b"100 Continue" in first and b"100 Continue" in second
        assert answer.count(b"HTTP/1.1 200") == 2


def test_few_descriptors_are_shared_between_connections_and_those_being_accepted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(serving.resource, "getrlimit", lambda _: (260, 260))
    monkeypatch.setattr(serving.resource, "setrlimit", lambda _, limits: None)
    monkeypatch.setattr(serving.psutil.Process, "num_fds", lambda _: 10)
    limits = serving.within_descriptors(PeerLimits())
    assert limits.connections >= 80
    assert 10 + serving.ACCEPT_TURNS * limits.backlog + limits.connections + serving.SPARE_DESCRIPTORS <= 260


class Stopping:
    """A server in a thread that is told to stop while calls are in flight."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, pass_s: float) -> None:
        monkeypatch.setattr("hyco_export.server.engine.SETTLE_S", 0.5)
        self.entered, self.release = threading.Event(), threading.Event()
        stop = self

        class Slow(ScriptedSession):
            def prime(self, ids: np.ndarray) -> np.ndarray:
                stop.entered.set()
                stop.release.wait(pass_s)
                return super().prime(ids)

        self.server = LiveServer(lambda: create_app(Engine(lambda: Slow(MODEL), FACTS, LIMITS), INFO))

    def post(self, body: bytes, size: int) -> socket.socket:
        peer = connected(self.server.url)
        head = f"POST /v1/sessions HTTP/1.1\r\nHost: h\r\nContent-Type: {wire.MEDIA_TYPE}\r\n"
        peer.sendall(f"{head}Content-Length: {size}\r\n\r\n".encode() + body)
        return peer


@pytest.mark.parametrize(("pass_s", "unfinished"), [(0.2, 0), (60.0, 2)])
def test_a_stop_answers_what_ends_in_time_and_refuses_the_rest(
    pass_s: float, unfinished: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    stopping = Stopping(monkeypatch, pass_s)
    body = wire.encode(PRIME)
    calls = [stopping.post(body, len(body)) for _ in range(2)]  # one in a pass, one behind it
    half = stopping.post(body[:5], len(body))
    assert stopping.entered.wait(timeout=30)
    time.sleep(0.2)
    began_s = time.monotonic()
    stopping.server.stop()
    assert time.monotonic() - began_s < 5
    answers = [received(call) for call in calls]
    refused = received(half)
    assert refused.startswith(b"HTTP/1.1 503") and refusal_in(refused).code == "shutting_down"
    for answer in answers:
        assert answer.startswith(b"HTTP/1.1 503" if unfinished else b"HTTP/1.1 200"), answer
        if unfinished:
            assert refusal_in(answer).code == "shutting_down" and refusal_in(answer).retry_after_s == 1
    assert stopping.server.unfinished == unfinished
    assert "Traceback" not in capfd.readouterr().err
    stopping.release.set()
    for peer in (*calls, half):
        peer.close()
