"""A client's transport with bad luck: connections that break in the middle."""

import socket
import struct
from collections import Counter

import numpy as np

from hyco_export.device.client import Access, HttpTransport, Patience

RESET = struct.pack("ii", 1, 0)  # SO_LINGER: closing sends a reset


class Saboteur(HttpTransport):
    """An HttpTransport that loses requests and replies.

    Args:
        resets: share of calls whose connection is reset: half right after the request, half after the server's work.
    """

    def __init__(self, url: str, seed: int, resets: float, access: Access | None = None) -> None:
        super().__init__(url, Patience(pauses_s=(0.0, 0.05, 0.2)), access=access)
        self._dice = np.random.default_rng(seed)
        self._resets = resets
        self.done: Counter[str] = Counter()

    def _exchange(self, method: str, path: str, body: bytes) -> bytes:
        fate = self._dice.random()
        if fate < self._resets / 2:
            self.done["resets after the request"] += 1
            connection = self._connection or self._connect()
            connection.request(method, path, body=body or None, headers=self._headers)
            self._reset(connection.sock)
            raise ConnectionResetError("reset after the request")
        answer = super()._exchange(method, path, body)
        if fate > 1.0 - self._resets / 2:
            self.done["replies lost"] += 1
            if self._connection is not None:
                self._reset(self._connection.sock)
            raise ConnectionResetError("the reply was lost")
        return answer

    def _reset(self, opened: socket.socket | None) -> None:
        if opened is not None:
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        self.close()
