"""Access to an engine's sessions: who owns a session, how often a caller may call, which rows are still to be sent.

A session of another owner looks exactly like one that never was. `LocalTransport` calls an engine of this process by
the same way as a device does over HTTP.
"""

import asyncio
import contextlib
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from functools import partial

import msgspec

from hyco_export.errors import HycoError, ProtocolError
from hyco_export.protocol import wire
from hyco_export.protocol.refusals import Reply, Sent, as_refusal, body_of, refused
from hyco_export.protocol.security import ANYBODY
from hyco_export.protocol.wire import Traffic
from hyco_export.server.interfaces import EnginePort, Gone, never_gone
from hyco_export.server.sessions import (
    OlderRows,
    check_first_rows,
    longest_spare,
    no_such_session,
    sessions_full,
    split_window,
)

LONGEST_ATTEMPT = 64  # characters
CALLERS_KEPT = 4096  # of a rate limiter: the caller unseen for longest is forgotten, and so is its debt
LOST_CODES = (wire.UNKNOWN_SESSION, "model_fault")  # the engine has dropped the session


class _Entry(msgspec.Struct):
    owner: str
    older: OlderRows | None
    attempt: str


class _Opening:
    """A PRIME in flight.

    replaced: the same attempt has been sent again; this one's caller no longer waits.
    """

    def __init__(self, owner: str, attempt: str) -> None:
        self.owner = owner
        self.attempt = attempt
        self.replaced = False


class SessionAccess:
    """Passes calls to an engine, each owner's to its own sessions only. Callable from any thread.

    Args:
        engine: makes the passes.
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


class _Bucket(msgspec.Struct):
    calls: float  # that may come at once
    at_s: float  # when that was true


class RateLimiter:
    """Lets every caller make `per_s` calls a second in the long run, `burst` at once.

    Args:
        now: monotonic seconds.
    """

    def __init__(self, per_s: float, burst: int, now: Callable[[], float] = time.monotonic) -> None:
        self._per_s = per_s
        self._burst = burst
        self._now = now
        self._buckets: OrderedDict[str, _Bucket] = OrderedDict()  # longest unseen first

    def take(self, caller: str) -> None:
        """Count a call.

        Raises:
            ProtocolError: code rate: the bucket is empty. Nothing was done, the call can be sent again.
        """
        now_s = self._now()
        bucket = self._buckets.setdefault(caller, _Bucket(self._burst, now_s))
        self._buckets.move_to_end(caller)
        if len(self._buckets) > CALLERS_KEPT:
            self._buckets.popitem(last=False)
        bucket.calls = min(self._burst, bucket.calls + (now_s - bucket.at_s) * self._per_s)
        bucket.at_s = now_s
        if bucket.calls < 1.0:
            rule = f"more than {self._per_s:g} calls a second, {self._burst} at once"
            wait_s = (1.0 - bucket.calls) / self._per_s
            raise ProtocolError("rate", rule, f"send it again in {math.ceil(wait_s)} s", wait_s)
        bucket.calls -= 1.0


class LocalTransport:
    """Calls into an engine of this process, through the same session access and the same bytes as over HTTP."""

    def __init__(self, engine: EnginePort, info: wire.ServerInfo) -> None:
        self._access = SessionAccess(engine)
        self._info = info
        self.traffic = Traffic(0, 0, 0, 0)

    def info(self) -> wire.ServerInfo:
        return wire.decode(wire.encode(self._info), wire.ServerInfo)

    def prime(self, request: wire.PrimeRequest) -> wire.PrimeReply:
        return self._pass(partial(self._access.prime, ANYBODY), request, wire.PrimeReply)

    def verify(self, session: str, round_number: int, request: wire.VerifyRequest) -> wire.VerifyReply:
        return self._pass(partial(self._access.verify, ANYBODY, session, round_number), request, wire.VerifyReply)

    def close_session(self, session: str) -> None:
        self._access.close(ANYBODY, session)

    def _pass(self, call: Callable[[Sent], Reply], request: Sent, kind: type[Reply]) -> Reply:
        """Request and answer as bytes; a refusal travels as its body."""
        body = wire.encode(request)
        try:
            answer = wire.encode(call(wire.decode(body, type(request))))
        except HycoError as error:
            raise refused(wire.encode(body_of(as_refusal(error)))) from error
        self.traffic = Traffic(len(body), len(answer), len(body), len(answer))
        return wire.decode(answer, kind)
