"""uvicorn's HTTP/1.1 connection with an end to patience: slow heads, readers that do not read, too many connections.

Knows asyncio and uvicorn; no routes. Bodies that come slowly are the application's to refuse.
"""

import asyncio
from functools import partial
from typing import Any

import h11
import msgspec
from uvicorn.protocols.http.h11_impl import H11Protocol

from hyco_export.errors import ProtocolError
from hyco_export.runtime import wire
from hyco_export.runtime.refusals import body_of, status_of

SLOWEST_READER_BYTES_PER_S = 1_000  # a phone at the edge of a cell; below it a reply of 6 MB takes hours


class PeerLimits(msgspec.Struct, frozen=True):
    """What a connection may take."""

    connections: int = 256
    head_bytes: int = 8_192  # request line and headers
    head_s: float = 10.0  # from a head's first byte to its last
    stall_s: float = 30.0  # over which a reader must take what SLOWEST_READER_BYTES_PER_S gives


class PatientProtocol(H11Protocol):
    """One connection."""

    def __init__(self, limits: PeerLimits, **uvicorn_arguments: Any) -> None:
        super().__init__(**uvicorn_arguments)
        self._limits = limits
        self._head_timer: asyncio.TimerHandle | None = None
        self._stall_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self._limits.connections:
            seen = f"all {self._limits.connections} connections are in use"
            refusal = ProtocolError("connections_full", seen, "try again later")
            transport.write(_farewell(refusal, "Service Unavailable"))
            transport.close()
            return
        self._head_timer = self.loop.call_later(self._limits.head_s, transport.close)

    def data_received(self, data: bytes) -> None:
        """h11 minds only heads that are not whole yet: what comes at once is given to it up to the limit."""
        while data and not self.transport.is_closing():  # what still comes after a refusal is nobody's
            size = len(data)
            if self.conn.their_state is h11.IDLE:
                size = max(1, self._limits.head_bytes + 1 - len(self.conn.trailing_data[0]))
            self._take(data[:size])
            data = data[size:]

    def _take(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE or self.transport.is_closing():
            self._stop_head_timer()
        elif self._head_timer is None:  # a head has begun
            self._head_timer = self.loop.call_later(self._limits.head_s, self.transport.close)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_head_timer()
        self._stop_stall_timer()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_reader()

    def resume_writing(self) -> None:
        self._stop_stall_timer()
        super().resume_writing()

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self.loop.call_later(self._limits.stall_s, self.transport.abort)  # close alone waits for the reader

    def send_400_response(self, msg: str) -> None:
        """What is no HTTP request: bytes of TLS, a head that is too long or contradicts itself."""
        hint = "see PROTOCOL.md; a head may have " + f"{self._limits.head_bytes} B, and this port may want TLS or none"
        self.transport.write(_farewell(ProtocolError("malformed", msg, hint), "Bad Request"))
        self.transport.close()

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _stop_stall_timer(self) -> None:
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None

    def _watch_reader(self) -> None:
        left = self.transport.get_write_buffer_size()
        self._stall_timer = self.loop.call_later(self._limits.stall_s, self._check_reader, left)

    def _check_reader(self, before: int) -> None:
        taken = before - self.transport.get_write_buffer_size()
        if taken < SLOWEST_READER_BYTES_PER_S * self._limits.stall_s:
            self.transport.abort()
        else:
            self._watch_reader()


def protocol_with(limits: PeerLimits) -> "partial[PatientProtocol]":
    """What uvicorn makes its connections with."""
    return partial(PatientProtocol, limits)


def _farewell(refusal: ProtocolError, reason: str) -> bytes:
    """The last answer of a connection."""
    body = wire.encode(body_of(refusal))
    head = (
        f"HTTP/1.1 {status_of(refusal)} {reason}\r\nContent-Type: {wire.MEDIA_TYPE}\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body
