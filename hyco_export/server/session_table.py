"""Which sessions a server holds: whose they are, how many there may be, when they are forgotten.

A session of another owner looks exactly like one that never was. Not thread-safe: the engine's lock is held.
"""

from collections.abc import Callable, Collection

from hyco_export.errors import ProtocolError
from hyco_export.protocol.security import ANYBODY
from hyco_export.server.admission import Limits, expiry_hint, no_such_session, retry_wait_s
from hyco_export.server.sessions import Session


class SessionTable:
    """The sessions by id, at most as many as the limits say, forgotten after `limits.idle_s` without a call.

    Args:
        limits: sessions at once, of all and of one owner; idle seconds.
        now: monotonic seconds.
    """

    def __init__(self, limits: Limits, now: Callable[[], float]) -> None:
        self._limits = limits
        self._now = now
        self._sessions: dict[str, Session] = {}

    def __len__(self) -> int:
        return len(self._sessions)

    @property
    def ids(self) -> frozenset[str]:
        return frozenset(self._sessions)

    @property
    def unfinished(self) -> int:
        """Sessions that may still ask for rounds."""
        return sum(session.verifier is not None for session in self._sessions.values())

    @property
    def prefilled(self) -> int:
        """Ids processed of prompts that wait for their first token. For metrics, so that no lock is needed."""
        return sum(session.prefilled for session in list(self._sessions.values()) if session.opening)

    def replace_attempt(self, owner: str, attempt: str) -> None:
        """A PRIME comes again: drop the session that the earlier try opened, or is about to open."""
        if not attempt:
            return
        for session in list(self._sessions.values()):
            if (session.owner, session.settings.attempt) == (owner, attempt):
                if session.opening:
                    session.replaced = True
                else:
                    self.drop(session.id)

    def require_share(self, owner: str) -> None:
        """A place for one more session of this owner: a free one, or that of its finished session which was unused for
        the longest. Sessions that are being opened count.

        Raises:
            ProtocolError: code sessions_full.
        """
        if owner == ANYBODY:
            return
        mine = [session for session in self._sessions.values() if session.owner == owner]
        most = self._limits.sessions_per_token
        if len(mine) >= most:
            self._evict(mine, f"this caller holds {len(mine)} sessions, at most {most} are given to one")

    def require_room(self) -> None:
        """A place for one more session of anybody, as above.

        Raises:
            ProtocolError: code sessions_full.
        """
        most = self._limits.sessions
        if len(self._sessions) >= most:
            self._evict(self._sessions.values(), f"all {most} sessions are in use")

    def _evict(self, sessions: Collection[Session], message: str) -> None:
        """Drop the one of these that only keeps its last reply, the one unused for the longest."""
        finished = [session for session in sessions if session.verifier is None and not session.calls]
        if not finished:
            left_s = self._next_expiry_s(sessions)
            hint = f"close a session or try again when one has ended{expiry_hint('; ', left_s)}"
            raise ProtocolError("sessions_full", message, hint, retry_wait_s(left_s))
        self.drop(min(finished, key=lambda session: session.last_used_s).id)

    def add(self, session: Session) -> None:
        session.last_used_s = self._now()
        self._sessions[session.id] = session

    def find(self, session_id: str, owner: str) -> Session:
        """The owner's session, marked as used.

        Raises:
            ProtocolError: code unknown_session.
        """
        session = self._sessions.get(session_id)
        if session is None or session.owner != owner:
            raise no_such_session()
        session.last_used_s = self._now()
        return session

    def close(self, session_id: str, owner: str) -> None:
        """Drop a session of this owner; of another's, or of none, nothing happens, and nobody can tell."""
        session = self._sessions.get(session_id)
        if session is not None and session.owner == owner:
            self.drop(session_id)

    def drop(self, session_id: str) -> None:
        """Forget a session and free its cache, after the pass that it is in; unknown ids are forgotten already."""
        session = self._sessions.pop(session_id, None)
        if session is not None:
            session.dropped = True
            if not session.in_pass:
                session.finish()

    def end_pass(self, session: Session) -> None:
        """The pass that a session was in has ended."""
        session.in_pass = False
        session.last_used_s = self._now()
        if session.dropped:
            session.finish()

    def expire(self) -> int:
        """Drop the sessions that nobody has called for too long; how many."""
        oldest_s = self._now() - self._limits.idle_s
        idle = [
            session.id for session in self._sessions.values() if not session.calls and session.last_used_s < oldest_s
        ]
        for session_id in idle:
            self.drop(session_id)
        return len(idle)

    def next_expiry_s(self) -> float | None:
        """Seconds until a session expires if nobody calls it; None while each has a call in flight."""
        return self._next_expiry_s(self._sessions.values())

    def _next_expiry_s(self, sessions: Collection[Session]) -> float | None:
        left_s = [session.last_used_s + self._limits.idle_s - self._now() for session in sessions if not session.calls]
        return max(0.0, min(left_s)) if left_s else None

    def clear(self) -> None:
        for session_id in list(self._sessions):
            self.drop(session_id)
