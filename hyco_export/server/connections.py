"""uvicorn's HTTP/1.1 connection with limits: on TLS handshakes, heads, readers, pieces of a body, open connections.

They are those without which a few hostile peers lock all others out, and which uvicorn does not have. A proxy cannot
have them all either: only the server knows whose connections to keep. A body that arrives slowly is refused by the
application (`http._read`), which reads it; how often somebody may call is a proxy's to limit.
"""

import asyncio
import http
import re
import ssl
from functools import partial
from typing import Any, cast

import h11
import msgspec
from uvicorn.protocols.http.h11_impl import H11Protocol

from hyco_export.errors import ProtocolError
from hyco_export.protocol import wire
from hyco_export.protocol.refusals import body_of, headers_of, status_of
from hyco_export.server.admission import shutting_down

SLOWEST_READER_BYTES_PER_S = 1_000  # a phone at the edge of a cell; at less a reply of 6 MB takes hours
PROBE_S = 1.0  # between two checks whether a caller that has closed its half still listens
BUSY_S = 1.0  # after which a caller is asked to try again where all connections are in use
SMALL_PIECE_BYTES = 1_024  # a body's pieces are counted while their mean is below it: whole packets carry more
TLS_CLOSE_S = 2.0  # for the peer's close_notify
READING = (h11.IDLE, h11.SEND_BODY)  # states of a peer from which bytes are expected
# key of an ASGI scope that the application sets: the caller showed a valid token or, on a server without tokens, holds
# a session. Where there are too many connections, those of other callers are closed first.
TRUSTED = "hyco_export.trusted"
ORIGIN = re.compile(rb"https?://[^/?#]*", re.IGNORECASE)


class PeerLimits(msgspec.Struct, frozen=True):
    """What one connection may take, and how many there may be."""

    connections: int = 256
    head_bytes: int = 8_192  # request line and headers
    head_s: float = 10.0  # from a head's first byte to its last; for a TLS handshake; for the rest of a refused body
    stall_s: float = 30.0  # over which a reader must take what SLOWEST_READER_BYTES_PER_S gives
    body_pieces: int = 512  # small chunks or packets of a body: each costs work, however few bytes it brings
    backlog: int = 128  # connections that wait to be accepted; one turn of the event loop accepts them all


class LimitedProtocol(H11Protocol):
    """One connection, counted from the moment it is accepted.

    Args:
        limits: what it may take.
        tls: its context; None for plain HTTP. The handshake is made here: uvicorn would count a connection after it.
    """

    def __init__(self, limits: PeerLimits, tls: ssl.SSLContext | None, **uvicorn_arguments: Any) -> None:
        super().__init__(**uvicorn_arguments)
        self.conn = _LimitedParser(limits)
        self._limits = limits
        self._tls = tls
        self._idle_since_s = 0.0  # accepted, or the last answer given
        self._trusted = False
        self._unparsed = bytearray()  # received bytes
        self._half_closed = False  # the peer sends no more
        self._head_timer: asyncio.TimerHandle | None = None  # for the rest of a head or of a refused body
        self._stall_timer: asyncio.TimerHandle | None = None
        self._probe_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.transport = transport
        self._idle_since_s = self.loop.time()
        if len(self.connections) >= self._limits.connections and not self._displace():
            if self._tls is None:
                seen = f"all {self._limits.connections} connections are in use"
                transport.write(_last_answer(ProtocolError("connections_full", seen, "try again later", BUSY_S)))
            transport.close()
            return
        self.connections.add(self)
        if self._tls is None:
            self._start()
            return
        transport.pause_reading()  # until the handshake reads
        task = self.loop.create_task(self._handshake(transport, self._tls))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def _handshake(self, plain: asyncio.Transport, tls: ssl.SSLContext) -> None:
        try:
            secured = await self.loop.start_tls(
                plain,
                self,
                tls,
                server_side=True,
                ssl_handshake_timeout=self._limits.head_s,
                ssl_shutdown_timeout=TLS_CLOSE_S,
            )
        except OSError as error:  # too slow, no TLS, or disconnected; ssl.SSLError is one
            error.__traceback__ = None  # its frames refer to this connection: 300 KB until a full garbage collection
            secured = None
        if secured is None:
            self.connections.discard(self)
            plain.abort()
            return
        self.transport = secured
        self._start()
        self._parse()

    def _start(self) -> None:
        """Begin to take requests."""
        super().connection_made(self.transport)
        self._head_timer = self.loop.call_later(self._limits.head_s, self.transport.close)

    def _displace(self) -> bool:
        """Make room: abort the connection that has been idle for longest, those of trusted callers last. False where
        all have a request in progress."""
        peers = cast("set[LimitedProtocol]", self.connections)
        idle = (peer for peer in peers if not peer.is_answering)
        longest = min(idle, key=lambda peer: (peer._trusted, peer._idle_since_s), default=None)
        if longest is None:
            return False
        self.connections.discard(longest)
        longest.transport.abort()
        return True

    def data_received(self, data: bytes) -> None:
        self._unparsed += data
        if self.flow is not None:  # None while the handshake's last packet is processed
            self._parse()

    def _parse(self) -> None:
        """Pass received bytes to h11 in pieces of at most a head's limit: h11 measures only what is incomplete, so it
        would take a head, chunk or trailer of any size that arrives at once. The next request waits until this one is
        answered."""
        while self._unparsed and self.conn.their_state in READING and not self.transport.is_closing():
            size = self._limits.head_bytes
            if self.conn.their_state is h11.IDLE:
                size = max(1, size + 1 - len(self.conn.trailing_data[0]))
            piece = bytes(self._unparsed[:size])
            del self._unparsed[:size]
            super().data_received(piece)
        if self._unparsed:
            self.flow.pause_reading()
        self._watch_sender()

    def eof_received(self) -> bool | None:  # type: ignore[override]  # as asyncio's
        """A peer that closes its half after a request still gets the answer; inside TLS there are no halves."""
        if self._tls is not None or not self.is_answering or self.conn.their_state is h11.SEND_BODY:
            return None
        self._half_closed = True
        self._start_probing()
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._head_timer, self._stall_timer, self._probe_timer):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        self._idle_since_s = self.loop.time()
        self._trusted = bool(self.cycle.scope.get(TRUSTED, self._trusted))
        super().on_response_complete()  # begins the next request, where h11 has one
        self._parse()
        if not self._half_closed:
            return
        if self.is_answering:  # a request that was sent before the half was closed
            self._start_probing()
        else:
            self.transport.close()

    def shutdown(self) -> None:
        """The server stops: close when the request in progress is answered; an incomplete one is refused."""
        if self.flow is None:  # in the handshake
            self.transport.abort()
        elif self.is_answering and self.conn.their_state is h11.SEND_BODY and not self.cycle.response_started:
            self.transport.write(_last_answer(shutting_down("the server is stopping")))
            self.transport.close()
        else:
            super().shutdown()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_reader()

    def resume_writing(self) -> None:
        if self._stall_timer is not None:
            self._stall_timer.cancel()
        super().resume_writing()

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self.loop.call_later(self._limits.stall_s, self.transport.abort)  # close() waits until all has been read

    def send_400_response(self, msg: str) -> None:
        """What is no HTTP request: bytes of TLS, a head that is too long or contradicts itself, a body in too many
        small pieces."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):  # no second answer behind one that has begun
            limits = f"a head may have {self._limits.head_bytes} B, a body {self._limits.body_pieces} chunks or packets"
            hint = f"see PROTOCOL.md; {limits}, and this port may want TLS or none"
            self.transport.write(
                _last_answer(ProtocolError("malformed", cast(_LimitedParser, self.conn).refused or msg, hint))
            )
        self.transport.close()

    @property
    def is_answering(self) -> bool:
        """Is a request in progress."""
        return self.cycle is not None and not self.cycle.response_complete

    def _watch_sender(self) -> None:
        """A head that has begun must end in time, and so must a body that the application does not read."""
        state = self.conn.their_state
        begun = state is h11.SEND_BODY or (state is h11.IDLE and bool(self.conn.trailing_data[0]))
        wanted = begun and not self.is_answering
        if wanted and self._head_timer is None:
            self._head_timer = self.loop.call_later(self._limits.head_s, self.transport.close)
        elif not wanted and self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _start_probing(self) -> None:
        if self._probe_timer is not None:
            self._probe_timer.cancel()
        self._probe_timer = self.loop.call_later(PROBE_S, self._probe)

    def _probe(self) -> None:
        """Send 100 Continue to a peer that has closed its half: if it is gone, its system resets the connection."""
        if self.transport.is_closing() or not self.is_answering or self.cycle.response_started:
            return
        if self.conn.their_http_version != b"1.0":
            self.transport.write(
                self.conn.send(h11.InformationalResponse(status_code=100, headers=[], reason=b"Continue"))
            )
        self._start_probing()

    def _watch_reader(self) -> None:
        left = self.transport.get_write_buffer_size()
        self._stall_timer = self.loop.call_later(self._limits.stall_s, self._check_reader, left)

    def _check_reader(self, before: int) -> None:
        taken = before - self.transport.get_write_buffer_size()
        if taken < SLOWEST_READER_BYTES_PER_S * self._limits.stall_s:
            self.transport.abort()
        else:
            self._watch_reader()


class _LimitedParser(h11.Connection):
    """h11's parser with a limit on the small pieces of a body. Absolute targets become paths (RFC 9112, 3.2.2).

    refused: why a body was refused; h11's own refusals leave it empty.
    """

    def __init__(self, limits: PeerLimits) -> None:
        super().__init__(h11.SERVER, limits.head_bytes)
        self._most_pieces = limits.body_pieces
        self._pieces = 0
        self._body_bytes = 0
        self.refused = ""

    def next_event(self) -> Any:
        """The next event of h11.

        Raises:
            h11.RemoteProtocolError: as h11; also for a body in too many small pieces.
        """
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._pieces = self._body_bytes = 0
            if origin := ORIGIN.match(event.target):
                path = event.target[origin.end() :]
                target = path if path.startswith(b"/") else b"/" + path
                return h11.Request(
                    method=event.method, headers=event.headers, target=target, http_version=event.http_version
                )
        elif isinstance(event, h11.Data):
            self._pieces += 1
            self._body_bytes += len(event.data)
            if self._pieces > self._most_pieces and self._body_bytes < self._pieces * SMALL_PIECE_BYTES:
                mean = self._body_bytes // self._pieces
                self.refused = f"a body of more than {self._most_pieces} chunks or packets, of {mean} B on average"
                raise h11.RemoteProtocolError(self.refused)
        return event


def protocol_with(limits: PeerLimits, tls: ssl.SSLContext | None) -> "partial[LimitedProtocol]":
    """What uvicorn calls for each connection."""
    return partial(LimitedProtocol, limits, tls)


def _last_answer(refusal: ProtocolError) -> bytes:
    """A refusal as the bytes of an HTTP answer, after which the connection is closed."""
    body = wire.encode(body_of(refusal))
    status = http.HTTPStatus(status_of(refusal))
    headers = {
        "Content-Type": wire.MEDIA_TYPE, "Content-Length": len(body), "Connection": "close", **headers_of(refusal)
    }  # fmt: skip
    lines = [f"HTTP/1.1 {status.value} {status.phrase}", *(f"{name}: {value}" for name, value in headers.items())]
    return "\r\n".join([*lines, "", ""]).encode() + body
