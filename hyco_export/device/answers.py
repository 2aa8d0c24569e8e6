"""An HTTP answer that is read by a deadline and up to a size, however it trickles in and whatever it announces.

Knows the standard library's client; no routes and no messages. A socket's own timeout counts from byte to byte: a
server that sends one a second never reaches it.
"""

import http.client
import io
import socket
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from hyco_export.errors import ProtocolError
from hyco_export.protocol import wire
from hyco_export.protocol.tree import ROOT, Tree

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


# What a device checks of a reply before it believes it. Pure; knows the wire's messages and trees.


ID_LIMIT = 1 << 31  # of every token id: the digest of committed ids takes them as int32


def check_ids(ids: Sequence[int], vocab_size: int = ID_LIMIT) -> None:
    """Ids that a server sent, before they reach the device's models.

    Raises:
        ProtocolError: code token_range.
    """
    for token in ids:
        if not 0 <= token < vocab_size:
            raise ProtocolError("token_range", f"the server sent the token {token}, which is outside [0, {vocab_size})")


def check_reply(reply: wire.VerifyReply, number: int, tree: Tree) -> None:
    """A verdict must be about the round and the tree that were sent: a wrong one would poison every later round.

    Raises:
        ProtocolError: codes round_mismatch, empty_round, path_mismatch.
    """
    if reply.round != number:
        raise ProtocolError("round_mismatch", f"reply to round {reply.round}, sent round {number}")
    if not reply.tokens:
        raise ProtocolError("empty_round", f"round {number} committed no token")
    if len(reply.drawn) != len(reply.accepted):
        seen = f"{len(reply.drawn)} draws for {len(reply.accepted)} accepted rows"
        raise ProtocolError("path_mismatch", f"round {number}: {seen}")
    if reply.drafted and not len(tree):  # the server's own chain: its rows are not ours to check
        return
    if not reply.finished and len(reply.tokens) != len(reply.accepted) + 1:
        seen = f"{len(reply.tokens)} tokens for {len(reply.accepted)} accepted rows"
        raise ProtocolError("path_mismatch", f"round {number}: {seen}, expected one more")
    parent = ROOT
    for depth, (row, token) in enumerate(zip(reply.accepted, reply.tokens, strict=False), start=1):
        if not 0 <= row < len(tree) or tree.parents[row] != parent or tree.tokens[row] != token:
            raise ProtocolError("path_mismatch", f"round {number}: accepted row {row} is off the path at depth {depth}")
        parent = row
