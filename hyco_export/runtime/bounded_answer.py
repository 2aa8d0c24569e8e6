"""An HTTP answer that is read by a deadline and up to a size, however it trickles in and whatever it announces.

Knows the standard library's client; no routes and no messages. A socket's own timeout counts from byte to byte: a
server that sends one a second never reaches it.
"""

import http.client
import io
import socket
import time
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer as Buffer


class BoundedAnswer(http.client.HTTPResponse):
    """Reads of it raise TimeoutError after the deadline and `http.client.HTTPException` beyond the size.

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
