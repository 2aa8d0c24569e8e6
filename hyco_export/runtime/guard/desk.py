"""What a server knows of a session that its engine does not: whose it is, and which rows are still to be sent.

Knows owners and session names; nothing of models, ids or HTTP. A session of another owner looks exactly like one that
never was. Callable from any thread.
"""

import math
import threading
import time
from collections.abc import Callable

import msgspec

from hyco_export.errors import ProtocolError
from hyco_export.runtime import wire
from hyco_export.runtime.first_window import OlderRows, check_first_rows, split_window
from hyco_export.runtime.guard.tokens import ANYBODY
from hyco_export.runtime.ports import EnginePort, Gone, never_gone
from hyco_export.runtime.sessions import no_such_session

LONGEST_ATTEMPT = 64  # characters
LOST_CODES = (wire.UNKNOWN_SESSION, "model_fault")  # the engine has dropped the session


class _Entry(msgspec.Struct):
    owner: str
    last_used_s: float
    older: OlderRows | None
    attempt: str


class Desk:
    """Takes calls for an engine.

    Args:
        engine: who does the work.
        sessions_per_owner: an owner's sessions at once; callers that nobody tells apart have the engine's limit only.
        idle_s: seconds without a call after which the engine forgets a session.
        now: monotonic seconds.
    """

    def __init__(
        self,
        engine: EnginePort,
        sessions_per_owner: int = 1,
        idle_s: float = math.inf,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._sessions_per_owner = sessions_per_owner
        self._idle_s = idle_s
        self._now = now
        self._lock = threading.Lock()
        self._entries: dict[str, _Entry] = {}
        self._opening: dict[str, int] = {}  # PRIME calls in flight by owner

    def prime(self, owner: str, request: wire.PrimeRequest, gone: Gone = never_gone) -> wire.PrimeReply:
        """Open a session of `owner`; one that an earlier try of this call opened is closed.

        Raises:
            ProtocolError: code sessions_full for this owner, value_range; whatever the engine refuses.
        """
        check_first_rows(request)
        if len(request.attempt) > LONGEST_ATTEMPT:
            seen = f"attempt has {len(request.attempt)} characters, at most {LONGEST_ATTEMPT} are taken"
            raise ProtocolError("value_range", seen)
        self._close_attempt(owner, request.attempt)
        self._reserve(owner)
        try:
            reply, older = split_window(self._engine.prime(request, gone), request.first_rows)
            with self._lock:
                self._entries[reply.session] = _Entry(owner, self._now(), older, request.attempt)
            return reply
        finally:
            self._release(owner)

    def verify(
        self,
        owner: str,
        session: str,
        round_number: int,
        request: wire.VerifyRequest,
        gone: Gone = never_gone,
    ) -> wire.VerifyReply:
        """A round of a session of `owner`.

        Raises:
            ProtocolError: code unknown_session, also for another's session; whatever the engine refuses.
        """
        entry = self._require(owner, session)
        try:
            return _with_older_rows(self._engine.verify(session, round_number, request, gone), round_number, entry)
        except ProtocolError as refusal:
            if refusal.code in LOST_CODES:
                self._forget(session)
            raise

    def close(self, owner: str, session: str) -> None:
        """Free a session of `owner`; of another's, or of none, nothing happens, and nobody can tell."""
        with self._lock:
            entry = self._entries.get(session)
            if entry is None or entry.owner != owner:
                return
            del self._entries[session]
        self._engine.close(session)

    def _close_attempt(self, owner: str, attempt: str) -> None:
        """Close what an earlier try opened: its reply was lost, or the call would not come again."""
        if not attempt:
            return
        with self._lock:
            names = [n for n, entry in self._entries.items() if (entry.owner, entry.attempt) == (owner, attempt)]
        for name in names:
            self.close(owner, name)

    def _reserve(self, owner: str) -> None:
        """Count a PRIME in flight, so that many at once cannot pass the limit together."""
        with self._lock:
            self._expire()
            held = sum(entry.owner == owner for entry in self._entries.values()) + self._opening.get(owner, 0)
            if owner != ANYBODY and held >= self._sessions_per_owner:
                raise ProtocolError(
                    "sessions_full",
                    f"this caller holds {held} sessions, at most {self._sessions_per_owner} are given to one",
                    "close a session or try again later",
                )
            self._opening[owner] = self._opening.get(owner, 0) + 1

    def _release(self, owner: str) -> None:
        with self._lock:
            self._opening[owner] -= 1
            if not self._opening[owner]:
                del self._opening[owner]

    def _require(self, owner: str, session: str) -> _Entry:
        with self._lock:
            entry = self._entries.get(session)
            if entry is None or entry.owner != owner:
                raise no_such_session()
            entry.last_used_s = self._now()
            return entry

    def _forget(self, session: str) -> None:
        with self._lock:
            self._entries.pop(session, None)

    def _expire(self) -> None:
        """Drop what the engine has dropped by now."""
        oldest_s = self._now() - self._idle_s
        for session in [name for name, entry in self._entries.items() if entry.last_used_s < oldest_s]:
            del self._entries[session]


def _with_older_rows(reply: wire.VerifyReply, round_number: int, entry: _Entry) -> wire.VerifyReply:
    """The reply with its part of the first window; frees the window once all of it was answered for."""
    older = entry.older
    if older is None or reply.handoff is None:
        return reply
    if round_number > older.parts:  # the round before this one has arrived, or this one would have been refused
        entry.older = None
        return reply
    return msgspec.structs.replace(reply, handoff=older.attach(reply.handoff, round_number))
