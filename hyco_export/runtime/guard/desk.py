"""What a server knows of a session that its engine does not: whose it is, and which rows are still to be sent.

Knows owners and session names; nothing of models, ids or HTTP. A session of another owner looks exactly like one that
never was. Callable from any thread.
"""

import asyncio
import contextlib
import threading
from collections.abc import Iterator

import msgspec

from hyco_export.errors import ProtocolError
from hyco_export.runtime import wire
from hyco_export.runtime.first_window import OlderRows, check_first_rows, split_window
from hyco_export.runtime.guard.tokens import ANYBODY
from hyco_export.runtime.ports import EnginePort, Gone, never_gone
from hyco_export.runtime.sessions import longest_spare, no_such_session, sessions_full

LONGEST_ATTEMPT = 64  # characters
LOST_CODES = (wire.UNKNOWN_SESSION, "model_fault")  # the engine has dropped the session


class _Entry(msgspec.Struct):
    owner: str
    older: OlderRows | None
    attempt: str


class _Opening:
    """A PRIME in flight. replaced: the same attempt has been sent again meanwhile, nobody waits for this one."""

    def __init__(self, owner: str, attempt: str) -> None:
        self.owner = owner
        self.attempt = attempt
        self.replaced = False


class Desk:
    """Takes calls for an engine.

    Args:
        engine: who does the work.
        sessions_per_owner: an owner's sessions at once; callers that nobody tells apart have the engine's limit only.
    """

    def __init__(self, engine: EnginePort, sessions_per_owner: int = 1) -> None:
        self._engine = engine
        self._sessions_per_owner = sessions_per_owner
        self._lock = threading.Lock()  # taken before the engine's, never inside it
        self._entries: dict[str, _Entry] = {}
        self._opening: list[_Opening] = []

    def prime(self, owner: str, request: wire.PrimeRequest, gone: Gone = never_gone) -> wire.PrimeReply:
        """Open a session of `owner`; one that an earlier try of this call opened, or is about to, is closed. An owner
        whose share is used up gives the finished session that was unused for the longest.

        Raises:
            ProtocolError: code sessions_full for this owner, value_range; cancelled for a try that was sent again;
                whatever the engine refuses.
        """
        check_first_rows(request)
        if len(request.attempt) > LONGEST_ATTEMPT:
            seen = f"attempt has {len(request.attempt)} characters, at most {LONGEST_ATTEMPT} are taken"
            raise ProtocolError("value_range", seen)
        self._close_attempt(owner, request.attempt)
        opening = self._reserve(owner, request.attempt)
        try:
            primed = self._engine.prime(request, lambda: opening.replaced or gone())
            reply, older = split_window(primed, request.first_rows)
            with self._lock:
                if not opening.replaced:
                    self._entries[reply.session] = _Entry(owner, older, request.attempt)
                    return reply
        finally:
            with self._lock:
                self._opening.remove(opening)
        self._engine.close(reply.session)
        raise ProtocolError("cancelled", "the same attempt was sent again meanwhile", "wait for the later try's reply")

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
        with self._entry(owner, session) as entry:
            reply = self._engine.start_round(session, round_number, request, gone).result()
            return _with_older_rows(reply, round_number, entry)

    async def verify_on_loop(
        self,
        owner: str,
        session: str,
        round_number: int,
        request: wire.VerifyRequest,
        gone: Gone = never_gone,
    ) -> wire.VerifyReply:
        """`verify` for an event loop: no thread waits for the reply, which would be woken twice a round."""
        with self._entry(owner, session) as entry:
            pending = self._engine.start_round(session, round_number, request, gone)
            reply = await asyncio.shield(asyncio.wrap_future(pending))  # the engine answers whoever has stopped to wait
            return _with_older_rows(reply, round_number, entry)

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

    def _reserve(self, owner: str, attempt: str) -> _Opening:
        """Count a PRIME in flight, so that many at once cannot pass the limit together."""
        with self._lock:
            for earlier in self._opening:
                earlier.replaced |= bool(attempt) and (earlier.owner, earlier.attempt) == (owner, attempt)
            self._require_share(owner)
            opening = _Opening(owner, attempt)
            self._opening.append(opening)
            return opening

    def _require_share(self, owner: str) -> None:
        """The lock is held."""
        held = self._engine.held()
        self._entries = {session: entry for session, entry in self._entries.items() if session in held}
        if owner == ANYBODY:
            return
        mine = {session: held[session] for session, entry in self._entries.items() if entry.owner == owner}
        count = len(mine) + sum(opening.owner == owner for opening in self._opening)
        if count < self._sessions_per_owner:
            return
        spare = longest_spare(mine)
        if spare is None:
            seen = f"this caller holds {count} sessions, at most {self._sessions_per_owner} are given to one"
            raise sessions_full(seen, mine)
        del self._entries[spare]
        self._engine.close(spare)

    @contextlib.contextmanager
    def _entry(self, owner: str, session: str) -> Iterator[_Entry]:
        """For a round of the session, which is forgotten where the round shows that the engine has dropped it."""
        with self._lock:
            entry = self._entries.get(session)
            if entry is None or entry.owner != owner:
                raise no_such_session()
        try:
            yield entry
        except ProtocolError as refusal:
            if refusal.code in LOST_CODES:
                with self._lock:
                    self._entries.pop(session, None)
            raise


def _with_older_rows(reply: wire.VerifyReply, round_number: int, entry: _Entry) -> wire.VerifyReply:
    """The reply with its part of the first window; frees the window once all of it was answered for."""
    older = entry.older
    if older is None or reply.handoff is None:
        return reply
    if round_number > older.parts:  # the round before this one has arrived, or this one would have been refused
        entry.older = None
        return reply
    return msgspec.structs.replace(reply, handoff=older.attach(reply.handoff, round_number))
