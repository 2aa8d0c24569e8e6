"""The client side of the wire over HTTP: connections, time limits, retries and byte counts.

A transport serves one thread. It uses the standard library's client because a round is short: a call was measured at a
third of httpx's CPU time (0.14 and 0.45 ms on one core).
"""

import http.client
import io
import re
import secrets
import socket
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast
from urllib.parse import quote

import msgspec

from hyco_export.errors import ProtocolError, ServerError, UnreachableError
from hyco_export.protocol import wire
from hyco_export.protocol.refusals import refused
from hyco_export.protocol.security import client_context, is_loopback
from hyco_export.protocol.server_address import failed_call, foreign_answer, is_permanent, read_url
from hyco_export.protocol.wire import HEADER, Traffic, padding_bytes

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer as Buffer

SUCCESS_STATUSES = range(200, 300)
ANSWER_LIMIT_BYTES = 1 << 26  # ten times the largest hand-off of the paper
GATEWAY_STATUSES = (500, 502, 503, 504)  # a proxy whose server is away or died, when the body is not one of ours
ATTEMPT_BYTES = 9  # random ones: nobody else's try can be named
AFFINITY_BYTES = 6  # random ones: enough to spread clients over servers
BUSY_CODES = ("rate", "connections_full")  # refusals before anything was done: any call can be sent again
BUSY_TRIES = 5
METRICS_TYPE = "text/plain"
PREFILLED_LINE = re.compile(rb"^hyco_prefilled_ids (\S+)$", re.MULTILINE)  # of the metrics
LONGEST_WAIT_S = 30.0  # that a server may ask for between two tries


class Patience(msgspec.Struct, frozen=True):
    """How long to wait and how often to try. Rounds may be tried again at will: the server stores their verdicts.

    A call's limit runs from its first byte sent to its last byte read.
    """

    connect_s: float = 3.0
    info_s: float = 10.0  # nothing is computed for it
    reply_s: float = 120.0  # a prompt of 32K tokens is prefilled before PRIME's reply
    pauses_s: tuple[float, ...] = (0.0, 0.2, 1.0)  # before each further try of a round


class Access(msgspec.Struct, frozen=True):
    """How client and server authenticate each other.

    `token` travels with every call. `authority` (PEM) signs the server's certificate; without it the system's
    authorities do. `insecure` lets the token travel without TLS.
    """

    token: str = ""
    authority: Path | None = None
    insecure: bool = False


class HttpTransport:
    """Calls to a verifier server over one kept-alive connection.

    Args:
        url: `http://HOST:PORT` or `https://HOST:PORT`, with a path prefix where a proxy wants one.
        patience: time limits and retries.
        pause: waits that many seconds between tries.
        access: what the server wants to see, and how it is recognised.

    Raises:
        ServerError: the URL is not one of these, the authority's file cannot be used, or the token would travel in
            the clear.
    """

    def __init__(
        self,
        url: str,
        patience: Patience | None = None,
        pause: Callable[[float], None] = time.sleep,
        access: "Access | None" = None,
    ) -> None:
        access = access or Access()
        self._address = read_url(url, access.authority)
        self._shows_token = bool(access.token)
        self._headers = {"X-Session-Id": secrets.token_urlsafe(AFFINITY_BYTES)}  # one server of several: PROTOCOL.md, 1
        if access.token:
            self._headers["Authorization"] = f"Bearer {access.token}"
        self._tls = client_context(access.authority) if self._address.tls else None
        if access.token and not (self._tls or access.insecure or is_loopback(self._address.host)):
            raise ServerError(
                f"the token would travel in the clear to {self._address.host}",
                "use an https URL, or say --insecure inside a network that you trust",
            )
        self._patience = patience or Patience()
        self._reply_s = self._patience.reply_s
        self._answer_type = wire.MEDIA_TYPE
        self._pause = pause
        self._connection: _Connection | None = None
        self._failed_closes = 0  # failed tries of the last close_session: the next call has to connect anew
        self._sent_bytes = 0
        self.traffic = Traffic(0, 0, 0, 0)

    def info(self) -> wire.ServerInfo:
        """GET /v1/info."""
        self._reply_s = min(self._patience.info_s, self._patience.reply_s)
        try:
            return wire.decode(self._call("GET", "/v1/info", b"", once=True), wire.ServerInfo)
        finally:
            self._reply_s = self._patience.reply_s

    def prefilled(self) -> int | None:
        """GET /metrics: ids processed of prompts that wait for their first token; None where it does not say."""
        self._answer_type = METRICS_TYPE
        try:
            found = PREFILLED_LINE.search(self._call("GET", "/metrics", b"", once=True))
        finally:
            self._answer_type = wire.MEDIA_TYPE
        return None if found is None else int(float(found[1]))

    def prime(self, request: wire.PrimeRequest) -> wire.PrimeReply:
        """POST /v1/sessions. Sent again only when a kept-alive connection had gone stale."""
        return wire.decode(
            self._call("POST", "/v1/sessions", wire.encode(as_attempt(request)), once=True), wire.PrimeReply
        )

    def verify(self, session: str, round_number: int, request: wire.VerifyRequest) -> wire.VerifyReply:
        """POST /v1/sessions/{id}/rounds/{n}, tried again through breaks, timeouts and restarts: n is idempotent."""
        path = f"/v1/sessions/{quote(session, safe='')}/rounds/{round_number}"
        return wire.decode(self._call("POST", path, wire.encode(request), once=False), wire.VerifyReply)

    def close_session(self, session: str) -> None:
        """DELETE /v1/sessions/{id}."""
        try:
            self._call("DELETE", f"/v1/sessions/{quote(session, safe='')}", b"", once=True)
        except UnreachableError:
            self._failed_closes = 1
            raise

    def close(self) -> None:
        """Drop the connection; the next call opens another."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _call(self, method: str, path: str, body: bytes, once: bool) -> bytes:
        """The body of the answer. With `once` a call is repeated only when a kept-alive connection had gone stale.

        Raises:
            ServerError: no answer, or one that is not of this protocol.
            ProtocolError: a typed refusal.
        """
        self._sent_bytes = 0
        pauses = () if once else self._patience.pauses_s
        if self._connection is not None and self._connection.sock is None:
            self.close()  # as the last answer said: nothing is disturbed by that
        failed, self._failed_closes = self._failed_closes, 0
        tries = busy = 0
        while True:
            kept_alive = self._connection is not None
            self.traffic = Traffic(len(body), 0, self._sent_bytes, 0, failed + tries + busy)
            try:
                return self._exchange(method, path, body)
            except _Busy as refusal:
                busy += 1
                if busy > BUSY_TRIES or refusal.wait_s > LONGEST_WAIT_S:
                    raise refusal.error from None
                self._pause(refusal.wait_s)
            except (OSError, http.client.HTTPException, _NoServerBehindProxy) as error:
                self.close()
                stale = kept_alive and not isinstance(error, TimeoutError)
                if is_permanent(error):
                    raise failed_call(self._address, error) from error
                if stale and tries == 0:
                    tries += 1  # at once, on a new connection: servers close idle ones
                elif tries < len(pauses):
                    self._pause(pauses[tries])
                    tries += 1
                else:
                    raise failed_call(self._address, error) from error

    def _exchange(self, method: str, path: str, body: bytes) -> bytes:
        """One request and its answer."""
        connection = self._connection or self._connect()
        self._connection = connection
        connection.sent_bytes = 0
        deadline_s = time.monotonic() + self._reply_s
        connection.response_class = partial(_BoundedAnswer, deadline_s, ANSWER_LIMIT_BYTES)  # type: ignore[assignment]
        connection.sock.settimeout(self._reply_s)
        headers = self._headers | ({"Content-Type": wire.MEDIA_TYPE} if body else {})
        try:
            connection.request(method, self._address.prefix + path, body=body or None, headers=headers)
            response = connection.getresponse()
            if (response.length or 0) > ANSWER_LIMIT_BYTES:
                raise http.client.HTTPException(f"it announces an answer of {response.length:,} B")
            answer = response.read()
        finally:
            self._sent_bytes += connection.sent_bytes
        payload_down = len(answer) - min(len(answer), padding_bytes(response.headers.get(HEADER, "")))
        down = _head_bytes(response) + len(answer)
        self.traffic = Traffic(len(body), payload_down, self._sent_bytes, down, self.traffic.repeats)
        return self._checked(response, answer)

    def _checked(self, response: http.client.HTTPResponse, answer: bytes) -> bytes:
        kind = response.headers.get_content_type()
        ours = kind == wire.MEDIA_TYPE
        if response.status in SUCCESS_STATUSES and (kind == self._answer_type or not answer):
            return answer
        if ours:
            error = self._for_users(refused(answer))
            if error.code in BUSY_CODES:
                raise _Busy(error, response.headers.get("Retry-After", ""))
            raise error
        if response.status in GATEWAY_STATUSES:
            raise _NoServerBehindProxy(f"status {response.status} from a proxy")
        raise foreign_answer(self._address, response)

    def _for_users(self, refusal: ProtocolError) -> ProtocolError:
        """The refusal with the next step of who gave the URL and the token, not of who wrote the client."""
        if refusal.code == "unauthorized" and self._shows_token:
            refusal.hint = "the token from --token-file (or HYCO_TOKEN) is none of this server's: give one that is"
        elif refusal.code == "unauthorized":
            refusal.hint = "give one of its tokens: --token-file FILE, or the environment variable HYCO_TOKEN"
        elif refusal.code == "unknown_route" and self._address.prefix:
            refusal.message = f"the server has no calls under the path {self._address.prefix}"
            refusal.hint = f"give --server without a path: {self._address.root}"
        return refusal

    def _connect(self) -> "_Connection":
        """A new connection, with the short limit to connect."""
        host, port = self._address.host, self._address.port
        patience = self._patience
        connection: _Connection
        if self._tls is not None:
            connection = _TlsConnection(host, port, timeout=patience.connect_s, context=self._tls)
        else:
            connection = _PlainConnection(host, port, timeout=patience.connect_s)
        connection.auto_open = 0  # it would reconnect by itself, with the short limit for replies
        connection.connect()
        return connection


def as_attempt(request: wire.PrimeRequest) -> wire.PrimeRequest:
    """The request with a name for its tries, if it has none: sent twice, it leaves one session, not two."""
    if request.attempt:
        return request
    return msgspec.structs.replace(request, attempt=secrets.token_urlsafe(ATTEMPT_BYTES))


class _Busy(Exception):
    """A server that has done nothing with the call and wants it later."""

    def __init__(self, error: ProtocolError, retry_after: str) -> None:
        super().__init__(error)
        self.error = error
        self.wait_s = float(retry_after) if retry_after.isdecimal() else 1.0


class _NoServerBehindProxy(Exception):
    """A gateway status whose body is not ours: worth another try, like a broken connection."""


class _PlainConnection(http.client.HTTPConnection):
    """A connection that counts what it sends, headers included."""

    sent_bytes = 0

    def send(self, data: bytes) -> None:  # type: ignore[override]  # only bytes are sent here
        self.sent_bytes += len(data)
        super().send(data)


class _TlsConnection(http.client.HTTPSConnection):
    """The same inside TLS; what TLS itself adds is not counted."""

    sent_bytes = 0

    def send(self, data: bytes) -> None:  # type: ignore[override]
        self.sent_bytes += len(data)
        super().send(data)


_Connection = _PlainConnection | _TlsConnection


class _BoundedAnswer(http.client.HTTPResponse):
    """A response whose reads raise TimeoutError after the deadline and HTTPException beyond the size.

    A socket's own timeout counts from byte to byte: a server that sends one a second never reaches it.

    Args:
        deadline_s: of `time.monotonic`, for the answer's last byte.
        limit_bytes: of status line, headers and body with its chunk marks.
    """

    def __init__(
        self,
        deadline_s: float,
        limit_bytes: int,
        sock: socket.socket,
        debuglevel: int = 0,
        method: str | None = None,
        url: str | None = None,
    ) -> None:
        super().__init__(sock, debuglevel, method, url)
        self.fp.close()
        self.fp = io.BufferedReader(_BoundedReader(sock, deadline_s, limit_bytes))


class _BoundedReader(io.RawIOBase):
    def __init__(self, sock: socket.socket, deadline_s: float, limit_bytes: int) -> None:
        self._socket = sock
        self._raw = cast(io.RawIOBase, sock.makefile("rb", buffering=0))
        self._deadline_s = deadline_s
        self._limit_bytes = limit_bytes
        self._read_bytes = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: "Buffer") -> int | None:
        left_s = self._deadline_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("timed out")
        self._socket.settimeout(left_s)
        count = self._raw.readinto(buffer)
        self._read_bytes += count or 0
        if self._read_bytes > self._limit_bytes:
            raise http.client.HTTPException(f"its answer is larger than {self._limit_bytes:,} B")
        return count

    def close(self) -> None:
        self._raw.close()
        super().close()


def _head_bytes(response: http.client.HTTPResponse) -> int:
    """Size of the status line and the headers, each with its line end, and the empty line after them."""
    status_line = len(f"HTTP/1.1 {response.status} {response.reason}\r\n")
    return status_line + sum(len(f"{name}: {value}\r\n") for name, value in response.headers.items()) + len("\r\n")
