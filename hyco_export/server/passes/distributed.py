"""One verifier in several processes: the leader serves and judges, the followers run its passes with their shards.

Each pass is broadcast once, before it is made, with what has happened to its sessions since the last one: which ended,
what was reserved, which rows were committed. Nothing else needs the followers, so calls of other threads never wait for
them. `models.process_group` divides the weights.
"""

import logging
import os
import signal
from collections import deque
from collections.abc import Sequence
from itertools import count
from typing import Any, cast

import msgspec
import numpy as np
import torch

from hyco_export.errors import ProcessGroupError
from hyco_export.models.process_group import BroadcastChannel, ProcessGroup
from hyco_export.server.interfaces import Check, Prefill
from hyco_export.server.metrics import place_of
from hyco_export.server.passes.verifier import TorchVerifierSession, Verifier

END = b""  # the message after the last pass
START_AGAIN = "read the first message; start the server again"
_log = logging.getLogger(__name__)


class PartMessage(msgspec.Struct, array_like=True):
    """A session's part of a pass, and what happened to it since its last one.

    session: number of the session. reserved: positions; 0: no change. accepted: nodes that were committed. ids: the
    part's rows. parents: of a tree behind the root; None for a piece of a prompt.
    """

    session: int
    reserved: int
    accepted: tuple[int, ...] | None
    ids: list[int]
    parents: list[int] | None


class PassMessage(msgspec.Struct, array_like=True):
    """One pass; `ended`: sessions that are over."""

    ended: list[int]
    parts: list[PartMessage]


class Followers:
    """The other processes as the leader sees them: a context in which they follow, and whose end is broadcast to them.
    If it ends by an error, they notice that the leader is gone.

    Raises:
        ProcessGroupError: at the end of the context, after a pass that failed, since the shards may differ now, or in
            the middle of one that hangs: the followers hang in it too, and would not read the message.
    """

    def __init__(self, group: ProcessGroup, line: BroadcastChannel) -> None:
        self.group = group
        self._line = line
        self._failed: BaseException | None = None
        self.in_pass = False

    def __enter__(self) -> "Followers":
        return self

    def __exit__(self, *exc: object) -> None:
        if exc[1] is not None:
            return
        if self.in_pass:
            self._failed = self._failed or TimeoutError("a pass did not end")
        if self._failed is not None:
            raise self._failure()
        self._line.send(END)

    def broadcast(self, message: PassMessage) -> None:
        """Have the followers make a pass.

        Raises:
            ProcessGroupError: one is gone, or an earlier pass failed.
        """
        if self._failed is not None:
            raise self._failure()
        self._line.send(msgspec.msgpack.encode(message))

    def fail(self, error: BaseException) -> None:
        """A pass failed here and perhaps not in the other processes: the shards may differ now, so the server stops."""
        if self._failed is None:
            self._failed = error
            _log.error("a pass of the sharded verifier failed, the server stops: %s", place_of(error))
            os.kill(os.getpid(), signal.SIGTERM)

    def _failure(self) -> ProcessGroupError:
        error = ProcessGroupError(f"a pass of the sharded verifier failed: {type(self._failed).__name__}", START_AGAIN)
        error.__cause__ = self._failed
        return error


class LeadingVerifier(Verifier):
    """The verifier of the process that serves."""

    def __init__(self, followers: Followers, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._followers = followers
        self._numbers = count()
        self.ended: deque[int] = deque()  # appended to by any thread

    def open(self) -> "LeadingSession":
        return LeadingSession(self, next(self._numbers))

    def advance(self, parts: Sequence[Prefill | Check]) -> list[torch.Tensor]:
        """As the base class's, in all processes.

        Raises:
            ProcessGroupError: a process is gone, or an earlier pass failed.
        """
        ended = [self.ended.popleft() for _ in range(len(self.ended))]
        message = PassMessage(ended, [cast(LeadingSession, part.session).message(part) for part in parts])
        self._followers.in_pass = True
        try:
            self._followers.broadcast(message)
            return super().advance(parts)
        except Exception as error:
            self._followers.fail(error)
            raise
        finally:
            self._followers.in_pass = False


class LeadingSession(TorchVerifierSession):
    """A session that remembers what the followers do not know yet."""

    def __init__(self, verifier: LeadingVerifier, number: int) -> None:
        super().__init__(verifier)
        self._leader = verifier
        self._number = number
        self._reserved = 0
        self._accepted: tuple[int, ...] | None = None

    def reserve(self, positions: int) -> None:
        super().reserve(positions)
        self._reserved = positions

    def commit(self, accepted: tuple[int, ...]) -> None:
        super().commit(accepted)
        self._accepted = accepted

    def close(self) -> None:
        super().close()
        self._leader.ended.append(self._number)

    def message(self, part: Prefill | Check) -> PartMessage:
        """This session's part of the next pass, as the followers need it."""
        if isinstance(part, Prefill):
            message = PartMessage(self._number, self._reserved, self._accepted, part.ids.tolist(), None)
        else:
            ids = [int(part.root), *part.tokens.tolist()]
            message = PartMessage(self._number, self._reserved, self._accepted, ids, part.parents.tolist())
        self._reserved, self._accepted = 0, None
        return message


def follow(verifier: Verifier, line: BroadcastChannel) -> None:
    """Make the leader's passes until it ends.

    Raises:
        ProcessGroupError: the leader is gone.
    """
    sessions: dict[int, TorchVerifierSession] = {}
    while (received := line.receive()) != END:
        message = msgspec.msgpack.decode(received, type=PassMessage)
        for number in message.ended:
            sessions.pop(number, None)
        verifier.advance([_part(sessions, verifier, part) for part in message.parts])


def _part(sessions: dict[int, TorchVerifierSession], verifier: Verifier, message: PartMessage) -> Prefill | Check:
    """The follower's own part of a pass, with its session brought to where the leader's was."""
    session = sessions.setdefault(message.session, verifier.open())
    if message.reserved:
        session.reserve(message.reserved)
    if message.accepted is not None:
        session.commit(message.accepted)
    ids = np.asarray(message.ids, np.int64)
    if message.parents is None:
        return Prefill(session, ids)
    return Check(session, message.ids[0], ids[1:], np.asarray(message.parents, np.int64))
