"""Hostile callers against a server of its own on the loopback address: what a well-behaved neighbour feels meanwhile.

Run: `make attack` (a plain server and one with TLS, with a token and 1,024 descriptors each; a few seconds an attack).
The neighbour asks for its health and makes rounds in a session of its own. It prints a table and fails when the server
ends, does not serve a new caller afterwards, has filled its log or has kept memory. At last a server is told to stop in
the middle of an attack.
"""

import argparse
import contextlib
import http.client
import multiprocessing
import multiprocessing.dummy
import os
import resource
import socket
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import psutil
import trustme

from hyco_export.protocol import wire
from hyco_export.protocol.security import Tokens, server_context
from hyco_export.server.engine import Engine
from hyco_export.server.http import create_app
from hyco_export.server.serving import LOOPBACK, serve
from tests.endurance.fuzz import FACTS, INFO, LIMITS, MB, MODEL
from tests.support.scripted import ScriptedSession

TOKEN = "attack-0123456789abcdef"
DESCRIPTORS = 1_024  # of the server: the usual soft limit
CROWD = 1_100  # sockets: more than the server has descriptors
BODY_BYTES = 6_000_000  # of one-byte chunks, on the wire
SOME = 3  # attackers at once where one connection is work enough
PAUSE_S = 0.005  # of the neighbour between two calls
FRESH_EVERY = 10  # calls of the neighbour between two on a new connection
PATIENCE_S = 10.0  # of the neighbour
RECOVERY_S = 15.0  # after an attack, until a new caller must be served
LOG_LIMIT_BYTES = 10_000  # of an attack
MEMORY_LIMIT_MB = 160.0  # of an attack: twice what 256 TLS connections hold, 300 KB each; a leak holds thousands
STOP_LIMIT_S = 12.0  # from SIGTERM to the end of the process
MS = 1e3
HEAD = "Host: h\r\n"
KEYED_HEADERS = {"Authorization": f"Bearer {TOKEN}", "Content-Type": wire.MEDIA_TYPE}
PRIME = wire.PrimeRequest(
    wire.PROTOCOL_VERSION, [5, 6, 7, 8], wire.Sampling(0.0, 0, 1.0), wire.EXACT, 7, 1_000, "device", 0, ""
)
KEYED = f"Authorization: Bearer {TOKEN}\r\nContent-Type: {wire.MEDIA_TYPE}\r\n"


@dataclass(frozen=True)
class Target:
    """A server under attack."""

    port: int
    secure: bool

    def connect(self) -> socket.socket:
        """A connection, through TLS where the server wants it."""
        plain = socket.create_connection((LOOPBACK, self.port), timeout=PATIENCE_S)
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return _trusting().wrap_socket(plain) if self.secure else plain


Attack = Callable[[Target, float], None]  # what it does, for how many seconds at most


def silent(target: Target, seconds: float) -> None:
    """More connections than the server has descriptors, none of which says a word."""
    _crowd(target, seconds, b"")


def half_a_line(target: Target, seconds: float) -> None:
    _crowd(target, seconds, b"POST /v1/sess")


def half_a_header(target: Target, seconds: float) -> None:
    _crowd(target, seconds, b"POST /v1/sessions HTTP/1.1\r\nHost: h\r\nAuthor")


def idle_after_a_request(target: Target, seconds: float) -> None:
    """More connections than the server takes; each has had an answer, and stays."""
    _crowd(target, seconds, b"GET /healthz HTTP/1.1\r\nHost: h\r\n\r\n")


def aborted_handshakes(target: Target, seconds: float) -> None:
    """Connections that send no TLS where TLS is wanted."""
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        with contextlib.suppress(OSError), socket.create_connection((LOOPBACK, target.port), timeout=0.5) as peer:
            peer.sendall(b"GET /healthz HTTP/1.1\r\n\r\n")
            peer.recv(1)


def slow_bodies(target: Target, seconds: float) -> None:
    """Bodies that come a byte a second, with and without a token."""
    with contextlib.ExitStack() as stack:
        peers = []
        end_s = time.monotonic() + seconds
        for number in range(200):
            with contextlib.suppress(OSError):
                peer = stack.enter_context(target.connect())
                peer.sendall(_post("/v1/sessions", KEYED if number % 2 else "", "Content-Length: 1000"))
                peers.append(peer)
        while time.monotonic() < end_s:
            for peer in peers:
                with contextlib.suppress(OSError):
                    peer.sendall(b"x")
            time.sleep(1.0)


def chunks_of_one(method: str, path: str, keyed: bool) -> Attack:
    """Bodies of chunks of one byte."""

    def attack(target: Target, seconds: float) -> None:
        head = _request(method, path, KEYED if keyed else "", "Transfer-Encoding: chunked")
        _repeat(target, seconds, head, b"1\r\nx\r\n" * (BODY_BYTES // 6))

    return attack


def chunk_extensions(target: Target, seconds: float) -> None:
    piece = b"1;" + b"e" * 4_000 + b"\r\nx\r\n"
    head = _post("/v1/sessions", KEYED, "Transfer-Encoding: chunked")
    _repeat(target, seconds, head, piece * (BODY_BYTES // len(piece)))


def unread_bodies(target: Target, seconds: float) -> None:
    """Large bodies behind a call that reads none."""
    _repeat(target, seconds, _request("GET", "/healthz", "", "Content-Length: 1000000000"), b"x" * 100_000_000)


def tiny_sends(target: Target, seconds: float) -> None:
    """A body of a thousand bytes, each in a packet (and a TLS record) of its own."""
    _repeat(target, seconds, _post("/v1/sessions", KEYED, "Content-Length: 1000"), b"x" * 1_000, piece=1)


def header_floods(target: Target, seconds: float) -> None:
    """Heads of as many headers as fit, one after the other on a connection."""
    head = b"GET /healthz HTTP/1.1\r\n" + HEAD.encode() + b"a:b\r\n" * 1_600 + b"\r\n"
    _repeat(target, seconds, b"", head * 500)


def large_heads_behind(target: Target, seconds: float) -> None:
    """A small request and, in the same packet, a head of 200 KB: one that is looked at when it is there as a whole."""
    first = b"GET /healthz HTTP/1.1\r\nHost: h\r\n\r\n"
    _repeat(target, seconds, b"", first + b"GET /healthz HTTP/1.1\r\nHost: h\r\n" + b"a:b\r\n" * 40_000 + b"\r\n")


def pipelined(target: Target, seconds: float) -> None:
    _repeat(target, seconds, b"", b"GET /healthz HTTP/1.1\r\nHost: h\r\n\r\n" * 20_000)


def kept_alive_1_0(target: Target, seconds: float) -> None:
    head = b"GET /healthz HTTP/1.0\r\nConnection: keep-alive\r\n\r\n"
    _repeat(target, seconds, b"", head * 20_000)


def tiny_records(target: Target, seconds: float) -> None:
    """TLS records of one byte, thousands to a packet."""
    _repeat(target, seconds, _post("/v1/sessions", KEYED, "Content-Length: 1500"), b"", records=True)


ATTACKS: dict[str, Attack] = {
    "silent sockets": silent,
    "half a request line": half_a_line,
    "half a header": half_a_header,
    "idle after a request": idle_after_a_request,
    "slow bodies": slow_bodies,
    "one-byte chunks, good token": chunks_of_one("POST", "/v1/sessions", True),
    "one-byte chunks, 401": chunks_of_one("POST", "/v1/sessions", False),
    "one-byte chunks, 404": chunks_of_one("POST", "/nothing", True),
    "one-byte chunks, 405": chunks_of_one("PUT", "/v1/sessions", True),
    "one-byte chunks, /healthz": chunks_of_one("GET", "/healthz", False),
    "chunk extensions": chunk_extensions,
    "unread bodies": unread_bodies,
    "a packet a byte": tiny_sends,
    "header floods": header_floods,
    "large heads behind small": large_heads_behind,
    "pipelining": pipelined,
    "HTTP/1.0 keep-alive": kept_alive_1_0,
}
TLS_ATTACKS = {
    name: ATTACKS[name]
    for name in ("silent sockets", "half a header", "idle after a request", "one-byte chunks, 401", "pipelining")
}
TLS_ATTACKS |= {"one-byte records": tiny_records, "aborted handshakes": aborted_handshakes}


def _trusting() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def _request(method: str, path: str, *lines: str) -> bytes:
    rest = "".join(line if line.endswith("\r\n") or not line else line + "\r\n" for line in lines)
    return f"{method} {path} HTTP/1.1\r\n{HEAD}{rest}\r\n".encode()


def _post(path: str, *lines: str) -> bytes:
    return _request("POST", path, *lines)


def _crowd(target: Target, seconds: float, first: bytes) -> None:
    """Open CROWD connections, send each the same beginning, and do nothing more; open the lost ones again."""
    end_s = time.monotonic() + seconds
    peers: list[socket.socket] = []
    while time.monotonic() < end_s:
        while len(peers) < CROWD and time.monotonic() < end_s:
            try:
                peer = target.connect() if first else socket.create_connection((LOOPBACK, target.port), timeout=0.5)
                peers.append(peer)
                peer.sendall(first)
            except OSError:
                break
        time.sleep(0.05)
    for peer in peers:
        peer.close()


def _repeat(
    target: Target, seconds: float, head: bytes, body: bytes, piece: int = 1 << 18, records: bool = False
) -> None:
    """Some connections that send a request and read little, again and again until the time is over."""
    peers = multiprocessing.dummy.Pool(SOME)
    end_s = time.monotonic() + seconds

    def attacker(_: int) -> None:
        while time.monotonic() < end_s:
            with contextlib.suppress(OSError), target.connect() as peer:
                peer.sendall(head)
                if records:
                    _records(peer, 1_400)
                for start in range(0, len(body), piece):
                    peer.sendall(body[start : start + piece])
                    if time.monotonic() > end_s:
                        return
                peer.settimeout(0.2)
                while peer.recv(1 << 16):
                    pass

    peers.map(attacker, range(SOME))


def _records(peer: socket.socket, count: int) -> None:
    """Write single bytes as TLS records, held back by the system until many make a packet."""
    peer.setsockopt(socket.IPPROTO_TCP, 3, 1)  # TCP_CORK
    for _ in range(count):
        peer.send(b"x")
    peer.setsockopt(socket.IPPROTO_TCP, 3, 0)


@dataclass
class Felt:
    """What the neighbour saw: milliseconds of its calls, and how many got no answer."""

    kept_ms: list[float] = field(default_factory=list)
    fresh_ms: list[float] = field(default_factory=list)
    round_ms: list[float] = field(default_factory=list)
    lost: int = 0

    def figures(self) -> str:
        """p50, p99, max of the calls, and p99 of the rounds."""
        every = [*self.kept_ms, *self.fresh_ms] or [float("nan")]
        p50, p99 = np.percentile(every, [50, 99])
        return f"{p50:8.1f} {p99:8.1f} {max(every):8.1f} {np.percentile(self.round_ms or [float('nan')], 99):8.1f}"


def neighbour(target: Target, go_on: Callable[[], bool]) -> Felt:
    """GET /healthz again and again, most of the time on a kept connection, every tenth time on a new one; and rounds
    on a connection of their own."""
    felt, kept, rounds, number = Felt(), _connection(target), Rounds(target), 0
    while go_on():
        _felt(felt, felt.round_ms, rounds.next, rounds.start_again)
        number += 1
        if number % FRESH_EVERY == 0:
            connection = _connection(target)
            _felt(felt, felt.fresh_ms, partial(_healthy, connection), connection.close)
            connection.close()
        else:
            _felt(felt, felt.kept_ms, partial(_healthy, kept), kept.close)
        time.sleep(PAUSE_S)
    kept.close()
    rounds.close()
    return felt


def _felt(felt: Felt, times_ms: list[float], call: Callable[[], None], lost: Callable[[], None]) -> None:
    """Time a call, and count it as lost where it got no answer."""
    began_s = time.perf_counter()
    try:
        call()
    except (OSError, http.client.HTTPException):
        felt.lost += 1
        lost()
    times_ms.append((time.perf_counter() - began_s) * MS)


class Rounds:
    """A session of the neighbour's: each call is a round with an empty tree."""

    def __init__(self, target: Target) -> None:
        self._connection = _connection(target)
        self._ids: list[int] = []
        self._session = ""
        self._round = 0

    def next(self) -> None:
        """The next round; a PRIME where there is no session."""
        if not self._session:
            reply = wire.decode(self._call("/v1/sessions", wire.encode(PRIME)), wire.PrimeReply)
            self._session, self._ids, self._round = reply.session, [*PRIME.prompt, reply.root], 0
        self._round += 1
        body = wire.VerifyRequest(wire.PROTOCOL_VERSION, len(self._ids), wire.committed_digest(self._ids), [], [])
        path = f"/v1/sessions/{self._session}/rounds/{self._round}"
        found = wire.decode(self._call(path, wire.encode(body)), wire.VerifyReply)
        self._ids += found.tokens
        if found.finished:
            self.close()

    def start_again(self) -> None:
        """After a lost call."""
        self._session = ""
        self._connection.close()

    def close(self) -> None:
        """Free the session."""
        with contextlib.suppress(OSError, http.client.HTTPException):
            self._connection.request("DELETE", f"/v1/sessions/{self._session}", headers=KEYED_HEADERS)
            self._connection.getresponse().read()
        self.start_again()

    def _call(self, path: str, body: bytes) -> bytes:
        self._connection.request("POST", path, body, KEYED_HEADERS)
        answer = self._connection.getresponse()
        said = answer.read()
        if answer.status != 200:
            raise http.client.HTTPException(f"status {answer.status}")
        return said


def _connection(target: Target) -> http.client.HTTPConnection:
    if target.secure:
        return http.client.HTTPSConnection(LOOPBACK, target.port, timeout=PATIENCE_S, context=_trusting())
    return http.client.HTTPConnection(LOOPBACK, target.port, timeout=PATIENCE_S)


def _healthy(connection: http.client.HTTPConnection) -> None:
    connection.request("GET", "/healthz")
    answer = connection.getresponse()
    if answer.status != 200 or answer.read() != b"alive\n":
        raise http.client.HTTPException(f"status {answer.status}")


@dataclass(frozen=True)
class Server:
    """The process under attack."""

    target: Target
    process: psutil.Process
    log: Path

    def state(self) -> tuple[int, float, int]:
        """Bytes of the log, megabytes of memory, descriptors."""
        return self.log.stat().st_size, self.process.memory_info().rss / MB, self.process.num_fds()


@contextlib.contextmanager
def served(secure: bool) -> Iterator[Server]:
    """A server of the toy engine as a process."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        leaf = trustme.CA().issue_cert(LOOPBACK)
        leaf.private_key_and_cert_chain_pem.write_to_path(folder / "both.pem")
        command = [sys.executable, __file__, "--serve", *(["--tls", str(folder / "both.pem")] if secure else [])]
        log = folder / "log"
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        with (
            log.open("wb") as errors,
            subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=environment,
                preexec_fn=_with_few_descriptors,
            ) as process,
        ):
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line, log.read_text()
            try:
                yield Server(Target(int(line), secure), psutil.Process(process.pid), log)
            finally:
                process.terminate()
                try:
                    process.wait(timeout=30)
                except subprocess.TimeoutExpired:
                    process.kill()


def _with_few_descriptors() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (DESCRIPTORS, DESCRIPTORS))


def serve_here(tls: Path | None) -> None:
    """The server of `served`, in its process."""
    app = create_app(Engine(lambda: ScriptedSession(MODEL), FACTS, LIMITS), INFO, Tokens([TOKEN]))
    context = server_context(tls, tls) if tls else None
    serve(app, on_ready=lambda _host, port: print(port, flush=True), tls=context)


@dataclass(frozen=True)
class Finding:
    """One attack: the table's row, and whether the server stood it."""

    row: str
    stood: bool


def attacked(server: Server, name: str, attack: Attack, seconds: float) -> Finding:
    """Measure the neighbour before and during an attack, and the server after it."""
    quiet_s = time.monotonic() + max(0.5, seconds / 3)
    before = neighbour(server.target, lambda: time.monotonic() < quiet_s)
    log, memory, descriptors = server.state()
    attacker = multiprocessing.get_context("fork").Process(target=attack, args=(server.target, seconds))
    attacker.start()
    during = neighbour(server.target, attacker.is_alive)
    attacker.join()
    stood = recovers(server, descriptors)
    log_bytes, memory_mb, now = 0, 0.0, 0
    if server.process.is_running():
        log_after, memory_after, now = server.state()
        log_bytes, memory_mb = log_after - log, memory_after - memory
    stood = stood and log_bytes <= LOG_LIMIT_BYTES and memory_mb <= MEMORY_LIMIT_MB
    row = (
        f"{name + (', TLS' if server.target.secure else ''):32} {before.figures()} {during.figures()}"
        f" {during.lost:5} {log_bytes:11,} {memory_mb:+7.1f} {descriptors:4} {now:4}  {'yes' if stood else 'NO'}"
    )
    return Finding(row, stood)


def recovers(server: Server, descriptors: int) -> bool:
    """Does a new caller get its answer, and are the attackers' descriptors free again."""
    end_s = time.monotonic() + RECOVERY_S
    while time.monotonic() < end_s:
        with contextlib.suppress(OSError, http.client.HTTPException, psutil.Error):
            if not server.process.is_running():
                return False
            with contextlib.closing(_connection(server.target)) as connection:
                _healthy(connection)
            if server.process.num_fds() <= descriptors + SOME:
                return True
        time.sleep(0.2)
    return False


def stopped(secure: bool, seconds: float) -> Finding:
    """SIGTERM in the middle of slow bodies, half handshakes and rounds: how long the process takes, what it logs."""
    with served(secure) as server:
        workers = [
            multiprocessing.get_context("fork").Process(target=attack, args=(server.target, seconds + STOP_LIMIT_S))
            for attack in (slow_bodies, silent)
        ]
        for worker in workers:
            worker.start()
        end_s = time.monotonic() + seconds
        neighbour(server.target, lambda: time.monotonic() < end_s)
        began_s = time.monotonic()
        server.process.terminate()
        _, alive = psutil.wait_procs([server.process], timeout=2 * STOP_LIMIT_S)
        took_s = time.monotonic() - began_s
        for worker in workers:
            worker.terminate()
            worker.join()
        log = server.log.read_text()
        stood = not alive and took_s <= STOP_LIMIT_S and "Traceback" not in log and len(log) <= LOG_LIMIT_BYTES
        row = f"SIGTERM in the middle{', TLS' if secure else ''}: ended after {took_s:.1f} s, log {len(log):,} B"
        return Finding(f"{row}  {'yes' if stood else 'NO'}", stood)


FELT = f"{'p50':>8} {'p99':>8} {'max':>8} {'rounds':>8}"  # the last: p99 of the rounds
HEADING = (
    f"{'':32} {'neighbour before, ms':^35} {'neighbour during, ms':^35} {'calls':5} {'log':>11} {'memory':>7} "
    f"{'descriptors':9} serves\n"
    f"{'attack':32} {FELT} {FELT} {'lost':5} {'B':>11} {'MB':>7} {'from':>4} {'to':>4}  after"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--only", help="attacks whose name holds this")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--tls", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve_here(options.tls)
        return
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4 * CROWD, most), most))
    print(HEADING, flush=True)
    stood = True
    for secure, attacks in ((False, ATTACKS), (True, TLS_ATTACKS)):
        with served(secure) as server:
            for name, attack in attacks.items():
                if options.only is None or options.only in name:
                    finding = attacked(server, name, attack, options.seconds)
                    print(finding.row, flush=True)
                    stood = stood and finding.stood
        if options.only is None:
            finding = stopped(secure, options.seconds)
            print(finding.row, flush=True)
            stood = stood and finding.stood
    sys.exit(not stood)


if __name__ == "__main__":
    main()
