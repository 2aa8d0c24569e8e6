"""The verifier engine: opens sessions and judges rounds over any VerifierSession, several sessions to a pass.

Its methods can be called from any thread; the models work on the scheduler's. `LocalTransport` calls an engine of this
process as a device calls one over HTTP.
"""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import TypeVar

from hyco_export.errors import HycoError, ProtocolError
from hyco_export.protocol import wire
from hyco_export.protocol.refusals import as_refusal, body_of, refused
from hyco_export.protocol.security import ANYBODY
from hyco_export.server.admission import (
    Batching,
    CacheBudget,
    Facts,
    Limits,
    check_attempt,
    check_prime,
    shutting_down,
)
from hyco_export.server.interfaces import Clock, SequentialModels, ThreadCpuClock, VerifierModels, VerifierSession
from hyco_export.server.scheduler import Scheduler, model_fault
from hyco_export.server.session_table import SessionTable
from hyco_export.server.sessions import Cancelled, PendingPrime, PendingRound, Session

SETTLE_S = 5.0  # for the calls in flight when the engine stops; then they are given up
PROBE = wire.PrimeRequest(wire.PROTOCOL_VERSION, [0], wire.Sampling(0.0, 0, 1.0), wire.EXACT, 0, 1, "device", 0, "")
Request = TypeVar("Request", wire.PrimeRequest, wire.VerifyRequest)
Reply = TypeVar("Reply", wire.PrimeReply, wire.VerifyReply)


class Engine:
    """PRIME, VERIFY and close. A session belongs to the owner that opened it.

    Args:
        open_session: makes an empty VerifierSession.
        facts: what the models are.
        limits: what a caller gets at most.
        clock: measures server_ms (`Scheduler`).
        now: monotonic seconds, for the expiry of idle sessions.
        models: computes several sessions together.
        batching: how calls share a pass.
    """

    def __init__(
        self,
        open_session: Callable[[], VerifierSession],
        facts: Facts,
        limits: Limits | None = None,
        clock: Clock | None = None,
        now: Callable[[], float] = time.monotonic,
        models: VerifierModels | None = None,
        batching: Batching | None = None,
    ) -> None:
        self.facts = facts
        self.limits = limits or Limits()
        self.clock: Clock = clock or ThreadCpuClock()
        self.batching = batching or Batching()
        self._open_session = open_session
        self._models = models or SequentialModels()
        self._budget = CacheBudget(self.limits.cache_bytes)
        self._table = SessionTable(self.limits, now)
        self._now = now
        self._probe: Future[wire.PrimeReply] | None = None
        self._stopping = False
        self._lock = threading.Lock()
        self._scheduler = Scheduler(self._lock, self._table, self._models, self.clock, self.batching, now)

    @property
    def session_count(self) -> int:
        return len(self._table)

    @property
    def prefilled(self) -> int:
        """Ids processed of prompts that wait for their first token."""
        return self._table.prefilled

    @property
    def reserved_bytes(self) -> int:
        """K/V memory of the sessions held."""
        return self._budget.used_bytes

    def prime(
        self, request: wire.PrimeRequest, cancelled: Cancelled | None = None, owner: str = ANYBODY
    ) -> wire.PrimeReply:
        """Prefill a prompt and draw the first token. Memory for the whole generation is reserved before that. A session
        that an earlier try of this call opened, or is about to open, is closed.

        cancelled: asked before each pass; a caller that has gone away gets no further one, and its session is freed.

        Raises:
            ProtocolError: what `check_attempt` and `check_prime` refuse; codes sessions_full, cache_size, cache_full,
                model_fault, shutting_down; cancelled, also for a try that was sent again.
        """
        check_attempt(request)
        with self._lock:
            self._table.expire()
            self._table.replace_attempt(owner, request.attempt)
            self._table.require_share(owner)
        check_prime(request, self.facts, self.limits)
        with self._lock:
            self._require_running()
            session = self._admit(request, owner)
            call = PendingPrime(session, self.facts, self.batching.prefill_rows, cancelled)
            self._scheduler.submit(call)
        opened = False
        try:
            reply = call.future.result()
            with self._lock:
                opened = not session.replaced
                session.opening = False
        finally:
            if not opened:
                self._drop(session)  # nobody knows its name
        if not opened:
            raise ProtocolError(
                "cancelled", "the same attempt was sent again meanwhile", "wait for the later try's reply"
            )
        return reply

    def verify(
        self,
        session_id: str,
        round_number: int,
        request: wire.VerifyRequest,
        cancelled: Cancelled | None = None,
        owner: str = ANYBODY,
    ) -> wire.VerifyReply:
        """The reply to `start_round`, for a caller with a thread that can wait.

        Raises:
            ProtocolError: see there.
        """
        return self.start_round(session_id, round_number, request, cancelled, owner).result()

    def start_round(
        self,
        session_id: str,
        round_number: int,
        request: wire.VerifyRequest,
        cancelled: Cancelled | None = None,
        owner: str = ANYBODY,
    ) -> "Future[wire.VerifyReply]":
        """Round `round_number` (1, 2, ...): judge the device's tree or the server's own chain, commit, hand off.

        The same round again gives the stored reply. A caller that has gone away before its pass changes nothing.

        Raises:
            ProtocolError: at once, or in the future: codes unknown_session (also for another's session), round_*,
                session_finished, length_differs, digest_differs, unsupported, those of `check_tree`, model_fault,
                cancelled, shutting_down.
        """
        with self._lock:
            self._require_running()
            self._table.expire()
            session = self._table.find(session_id, owner)
            call = PendingRound(session, round_number, request, self.facts, self.limits.node_limit, cancelled)
            self._scheduler.submit(call)
        return call.future

    def close(self, session_id: str, owner: str = ANYBODY) -> None:
        """Forget an owner's session and free its cache, after the pass in progress where it is in one; closing twice is
        closing once."""
        with self._lock:
            self._table.close(session_id, owner)

    def held(self) -> frozenset[str]:
        """Ids of the sessions that have not been dropped."""
        with self._lock:
            self._table.expire()
            return self._table.ids

    def expire(self) -> int:
        """Drop idle sessions; how many."""
        with self._lock:
            return self._table.expire()

    def passed_within(self, seconds: float) -> bool:
        """Has the model ended a pass in the last so many seconds?"""
        return self._now() - self._scheduler.last_pass_s <= seconds

    def probe(self) -> "Future[wire.PrimeReply]":
        """Ask the model for a pass over one token, in a session that nobody sees; done when it has made it. The one in
        flight where there is one: a model that hangs gathers no probes."""
        with self._lock:
            self._require_running()
            if self._probe is None or self._probe.done():
                session = Session(PROBE, ANYBODY, self._budget)
                session.verifier = self._open_session()
                call = PendingPrime(session, self.facts, self.batching.prefill_rows, None)
                self._probe = call.future
                self._scheduler.submit(call)
            return self._probe

    def shut_down(self) -> int:
        """Refuse new calls, give those in flight SETTLE_S to end, refuse what is left, and free every session.

        Returns:
            Calls that were left.
        """
        with self._lock:
            self._stopping = True
            left = self._scheduler.drain(SETTLE_S)
            self._table.clear()
        for call in left:
            call.answer(shutting_down("the server is stopping, and this call's pass did not end in time"))
        return len(left)

    def _require_running(self) -> None:
        if self._stopping:
            raise shutting_down("the server is stopping")

    def _admit(self, request: wire.PrimeRequest, owner: str) -> Session:
        """A session with its memory reserved; nothing is allocated yet. The lock is held."""
        self._table.expire()
        self._table.require_share(owner)
        self._table.require_room()
        session = Session(request, owner, self._budget)
        session.reserve(self._models.cache_bytes(session.positions), self._table.next_expiry_s())
        try:
            session.verifier = self._open_session()
        except Exception as error:
            session.finish()
            raise model_fault(error) from error
        self._table.add(session)
        return session

    def _drop(self, session: Session) -> None:
        with self._lock:
            self._table.drop(session.id)


class LocalTransport:
    """A device's calls into an engine of this process: the same messages and refusals as over HTTP."""

    def __init__(self, engine: Engine, info: wire.ServerInfo) -> None:
        self._engine = engine
        self._info = info
        self.traffic = wire.Traffic(0, 0, 0, 0)

    def info(self) -> wire.ServerInfo:
        return wire.decode(wire.encode(self._info), wire.ServerInfo)

    def prime(self, request: wire.PrimeRequest) -> wire.PrimeReply:
        return self._call(self._engine.prime, request, wire.PrimeReply)

    def verify(self, session: str, round_number: int, request: wire.VerifyRequest) -> wire.VerifyReply:
        return self._call(partial(self._engine.verify, session, round_number), request, wire.VerifyReply)

    def close_session(self, session: str) -> None:
        self._engine.close(session)

    def _call(self, answer: Callable[[Request], Reply], request: Request, kind: type[Reply]) -> Reply:
        """Request and reply as bytes; a refusal travels as its body."""
        body = wire.encode(request)
        try:
            reply = wire.encode(answer(wire.decode(body, type(request))))
        except HycoError as error:
            raise refused(wire.encode(body_of(as_refusal(error)))) from error
        self.traffic = wire.Traffic(len(body), len(reply), len(body), len(reply))
        return wire.decode(reply, kind)
