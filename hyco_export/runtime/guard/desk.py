"""Whose session is whose: the engine's calls for callers that are told apart.

Knows owners and session names; nothing of models, ids or HTTP. A session of another owner looks exactly like one that
never was. Callable from any thread.
"""

import threading
import time
from collections.abc import Callable

import msgspec

from hyco_export.errors import ProtocolError
from hyco_export.runtime import wire
from hyco_export.runtime.guard.tokens import ANYBODY
from hyco_export.runtime.ports import EnginePort
from hyco_export.runtime.sessions import no_such_session

LOST_CODES = (wire.UNKNOWN_SESSION, "model_fault")  # the engine has dropped the session


class _Entry(msgspec.Struct):
    owner: str
    last_used_s: float


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
        sessions_per_owner: int,
        idle_s: float,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._sessions_per_owner = sessions_per_owner
        self._idle_s = idle_s
        self._now = now
        self._lock = threading.Lock()
        self._entries: dict[str, _Entry] = {}
        self._opening: dict[str, int] = {}  # PRIME calls in flight by owner

    def prime(self, owner: str, request: wire.PrimeRequest) -> wire.PrimeReply:
        """Open a session of `owner`.

        Raises:
            ProtocolError: code sessions_full for this owner; whatever the engine refuses.
        """
        self._reserve(owner)
        try:
            reply = self._engine.prime(request)
            with self._lock:
                self._entries[reply.session] = _Entry(owner, self._now())
            return reply
        finally:
            self._release(owner)

    def verify(self, owner: str, session: str, round_number: int, request: wire.VerifyRequest) -> wire.VerifyReply:
        """A round of a session of `owner`.

        Raises:
            ProtocolError: code unknown_session, also for another's session; whatever the engine refuses.
        """
        self._require(owner, session)
        try:
            return self._engine.verify(session, round_number, request)
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

    def _require(self, owner: str, session: str) -> None:
        with self._lock:
            entry = self._entries.get(session)
            if entry is None or entry.owner != owner:
                raise no_such_session()
            entry.last_used_s = self._now()

    def _forget(self, session: str) -> None:
        with self._lock:
            self._entries.pop(session, None)

    def _expire(self) -> None:
        """Drop what the engine has dropped by now."""
        oldest_s = self._now() - self._idle_s
        for session in [name for name, entry in self._entries.items() if entry.last_used_s < oldest_s]:
            del self._entries[session]
