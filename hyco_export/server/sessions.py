"""Sessions on the server: their state, the table that holds them, the parts of the first hand-off's K/V window.

Nothing here is thread-safe: the engine calls it with its lock held.
"""

import secrets
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from hyco_export.errors import ProtocolError
from hyco_export.protocol import wire
from hyco_export.server.admission import CacheBudget, latest_wait, wait_for_a_place
from hyco_export.server.interfaces import Held, VerifierSession

ID_BYTES = 16  # 128 random bits: an id cannot be guessed
PRIME_AGAIN = "prime again with the committed ids"
RESTART_S = 1.0  # after which a server that is stopping may be there again


def no_such_session() -> ProtocolError:
    """The one refusal for sessions that expired, ended, never were or are another caller's: nobody can tell which."""
    return ProtocolError(wire.UNKNOWN_SESSION, "no such session: it expired, ended or never was", PRIME_AGAIN)


def shutting_down(reason: str) -> ProtocolError:
    """The refusal of a server that stops."""
    return ProtocolError("shutting_down", reason, f"try another server, or {PRIME_AGAIN}", RESTART_S)


def longest_spare(held: Mapping[str, Held]) -> str | None:
    """Whose place a new session may take: of those that only keep their last reply, the one unused for the longest."""
    spare = [(entry.expires_s or 0.0, session_id) for session_id, entry in held.items() if entry.spare]
    return min(spare)[1] if spare else None


def next_expiry_s(held: Mapping[str, Held]) -> float | None:
    """Seconds until the first of these sessions expires; None when none is idle."""
    return min((entry.expires_s for entry in held.values() if entry.expires_s is not None), default=None)


def sessions_full(message: str, held: Mapping[str, Held]) -> ProtocolError:
    """The refusal of a PRIME where all of these sessions are in use."""
    left_s = next_expiry_s(held)
    hint = f"close a session or try again when one has ended{latest_wait('; ', left_s)}"
    return ProtocolError("sessions_full", message, hint, wait_for_a_place(left_s))


class Answered(NamedTuple):
    """The last round's request and reply, kept for retries."""

    request: wire.VerifyRequest
    reply: wire.VerifyReply


class Ahead(NamedTuple):
    """What the server's own head drafted for the next round, and what that cost."""

    chain: Sequence[int]
    server_ms: float


class Session:
    """One generation: its settings, its committed ids (prompt and root included), its place in the protocol.

    calls: in flight. busy: in the pass that is being made; then a drop frees the cache after it. dropped: forgotten.
    """

    def __init__(self, request: wire.PrimeRequest, budget: CacheBudget) -> None:
        self.id = secrets.token_urlsafe(ID_BYTES)
        self.settings = request
        self.verifier: VerifierSession | None = None  # None once finished: the cache is freed
        self.calls = 0
        self.busy = False
        self.dropped = False
        self._budget = budget
        self._reserved_bytes = 0
        self.committed = array("i", request.prompt)
        self.room = request.max_new_tokens - request.continue_from  # tokens that may still be committed
        self.next_round = 1
        self.answered: Answered | None = None
        self.ahead: Ahead | None = None
        self.last_used_s = 0.0

    @property
    def length(self) -> int:
        return len(self.committed)

    @property
    def root(self) -> int:
        """The newest committed token, not yet processed by the verifier."""
        return self.committed[-1]

    @property
    def positions(self) -> int:
        """Ids that may ever be committed."""
        return self.length + self.room

    def reserve(self, size_bytes: int, next_expiry_s: float | None) -> None:
        """Take the cache's memory out of the budget.

        Raises:
            ProtocolError: as `CacheBudget.take`.
        """
        self._budget.take(size_bytes, next_expiry_s)
        self._reserved_bytes = size_bytes

    def extend(self, tokens: Sequence[int]) -> None:
        """Commit tokens."""
        self.committed.extend(tokens)
        self.room -= len(tokens)

    def finish(self) -> None:
        """No more rounds: free the cache, keep the last reply for retries."""
        if self.verifier is not None:
            self.verifier.close()
            self.verifier = None
        self._budget.give_back(self._reserved_bytes)
        self._reserved_bytes = 0

    def stored_reply(self, round_number: int, request: wire.VerifyRequest) -> wire.VerifyReply | None:
        """The reply of the last round if this is its retry; None if this is the next round.

        Raises:
            ProtocolError: codes round_stale, round_future, round_differs.
        """
        if round_number == self.next_round:
            return None
        if round_number > self.next_round:
            raise ProtocolError("round_future", f"round {round_number}, but {self.next_round} is next", PRIME_AGAIN)
        if round_number < self.next_round - 1 or self.answered is None:
            raise ProtocolError("round_stale", f"round {round_number}, but {self.next_round} is next", PRIME_AGAIN)
        if request != self.answered.request:
            raise ProtocolError("round_differs", f"round {round_number} was answered for another body", PRIME_AGAIN)
        return self.answered.reply

    def check_belief(self, request: wire.VerifyRequest) -> None:
        """The device must believe what is committed here.

        Raises:
            ProtocolError: codes session_finished, length_differs, digest_differs.
        """
        if self.verifier is None:
            raise ProtocolError("session_finished", "this generation has ended", "delete the session")
        if request.length != self.length:
            seen = f"the device counts {request.length} committed ids, the server {self.length}"
            raise ProtocolError("length_differs", seen, PRIME_AGAIN)
        if request.digest != wire.committed_digest(self.committed):
            raise ProtocolError("digest_differs", "the device's committed ids are not the server's", PRIME_AGAIN)


class SessionTable:
    """At most `limit` sessions, forgotten after `idle_s` without a call.

    Args:
        limit: sessions held at once.
        idle_s: seconds after which an unused session is dropped.
        now: monotonic seconds.
    """

    def __init__(self, limit: int, idle_s: float, now: Callable[[], float]) -> None:
        self._limit = limit
        self._idle_s = idle_s
        self._now = now
        self._sessions: dict[str, Session] = {}

    def __len__(self) -> int:
        return len(self._sessions)

    def require_room(self) -> None:
        """Room for one more: where all places are taken, that of the finished session unused for the longest.

        Raises:
            ProtocolError: code sessions_full.
        """
        if len(self._sessions) < self._limit:
            return
        held = self.held()
        spare = longest_spare(held)
        if spare is None:
            raise sessions_full(f"all {self._limit} sessions are in use", held)
        self.drop(spare)

    def add(self, session: Session) -> None:
        session.last_used_s = self._now()
        self._sessions[session.id] = session

    def find(self, session_id: str) -> Session:
        """The session, marked as used.

        Raises:
            ProtocolError: code unknown_session.
        """
        session = self._sessions.get(session_id)
        if session is None:
            raise no_such_session()
        session.last_used_s = self._now()
        return session

    def drop(self, session_id: str) -> None:
        """Forget a session and free its cache, now or when it rests; unknown ids are forgotten already."""
        session = self._sessions.pop(session_id, None)
        if session is not None:
            session.dropped = True
            if not session.busy:
                session.finish()

    def rest(self, session: Session) -> None:
        """The pass that a session was in has ended."""
        session.busy = False
        session.last_used_s = self._now()
        if session.dropped:
            session.finish()

    def expire(self) -> int:
        """Drop idle sessions; how many."""
        oldest_s = self._now() - self._idle_s
        idle = [session.id for session in self._idle() if session.last_used_s < oldest_s]
        for session_id in idle:
            self.drop(session_id)
        return len(idle)

    def next_expiry_s(self) -> float | None:
        """Seconds until an idle session expires if nobody calls it; None when none is idle."""
        return next_expiry_s(self.held())

    def held(self) -> dict[str, Held]:
        """The sessions, by id."""
        now_s = self._now()
        return {
            session.id: Held(
                expires_s=None if session.calls else max(0.0, session.last_used_s + self._idle_s - now_s),
                spare=session.verifier is None and not session.calls,
            )
            for session in self._sessions.values()
        }

    @property
    def unfinished(self) -> int:
        """Sessions that may still ask for rounds."""
        return sum(session.verifier is not None for session in self._sessions.values())

    def clear(self) -> None:
        for session_id in list(self._sessions):
            self.drop(session_id)

    def _idle(self) -> list[Session]:
        return [session for session in self._sessions.values() if not session.calls]


class OlderRows(msgspec.Struct, frozen=True):
    """Rows of the first window that come after the first reply, newest first, so that drafting begins before all of it
    has arrived: `kv` of positions `first` ..., `rows` of them in each part."""

    kv: bytes
    first: int
    row_bytes: int
    rows: int

    @property
    def parts(self) -> int:
        """Rounds until all are sent."""
        return -(-len(self.kv) // (self.rows * self.row_bytes))

    def attach(self, handoff: wire.Handoff, round_number: int) -> wire.Handoff:
        """The hand-off of a round (1, 2, ...) with that round's part, if there is one."""
        if round_number > self.parts:
            return handoff
        step = self.rows * self.row_bytes
        end = len(self.kv) - (round_number - 1) * step
        start = max(0, end - step)
        return msgspec.structs.replace(
            handoff, older_kv=self.kv[start:end], older_first=self.first + start // self.row_bytes
        )


def split_window(reply: wire.PrimeReply, first_rows: int) -> tuple[wire.PrimeReply, OlderRows | None]:
    """A reply with its newest `first_rows` rows, and the others; as it is where 0 or nothing to part."""
    handoff = reply.handoff
    if handoff is None or first_rows == 0:
        return reply, None
    count = reply.length - 1 - handoff.first_position  # rows end right before the root
    if count <= first_rows:
        return reply, None
    row_bytes = len(handoff.kv) // count
    cut = (count - first_rows) * row_bytes
    older = OlderRows(handoff.kv[:cut], handoff.first_position, row_bytes, first_rows)
    newest = msgspec.structs.replace(
        handoff, kv=handoff.kv[cut:], first_position=handoff.first_position + count - first_rows
    )
    return msgspec.structs.replace(reply, handoff=newest), older


def check_first_rows(request: wire.PrimeRequest) -> None:
    """Refuse a negative number of rows.

    Raises:
        ProtocolError: code value_range.
    """
    if request.first_rows < 0:
        raise ProtocolError("value_range", f"first_rows is {request.first_rows}, it must be 0 (whole window) or more")
