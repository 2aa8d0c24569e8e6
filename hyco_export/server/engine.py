"""The verifier engine: sessions and rounds over any VerifierSession, several sessions to a pass.

One thread works on the models; calls wait for it in the scheduler's queue. Which sessions exist beside one, or share
its passes, changes nothing in it. A fault of the model ends the sessions whose pass it was and no other.
"""

import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from typing import Any, NamedTuple, TypeVar

import numpy as np

from hyco_export.errors import HycoError, ProtocolError
from hyco_export.protocol import wire
from hyco_export.server.admission import CacheBudget, Facts, Limits, check_prime
from hyco_export.server.interfaces import (
    Chain,
    Check,
    Gone,
    Held,
    Prefill,
    VerifierModels,
    VerifierSession,
    never_gone,
)
from hyco_export.server.metrics import Clock, ThreadCpuClock, place_of
from hyco_export.server.pending_requests import PendingPrime, PendingRequest, PendingRound
from hyco_export.server.scheduler import Batching, Scheduler, SequentialModels
from hyco_export.server.sessions import PRIME_AGAIN, Ahead, Session, SessionTable, shutting_down

Key = TypeVar("Key")
SETTLE_S = 5.0  # for the calls in flight when the engine stops; then they are given up
PROBE = wire.PrimeRequest(wire.PROTOCOL_VERSION, [0], wire.Sampling(0.0, 0, 1.0), wire.EXACT, 0, 1, "device", 0, "")
_log = logging.getLogger(__name__)


class Engine:
    """PRIME, VERIFY and close, callable from any thread.

    Args:
        open_session: makes an empty VerifierSession.
        facts: what the models are.
        limits: what a caller gets at most.
        clock: measures server_ms: the call's share of the passes it was in (draft, forward), by rows, and its own
            sampling and hand-off; a chain drafted ahead counts in the round that it is for.
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
        self._table = SessionTable(self.limits.sessions, self.limits.idle_s, now)
        self._now = now
        self._last_pass_s = -math.inf
        self._probe: Future[Any] | None = None
        self._stopping = False
        self._lock = threading.Lock()
        self._scheduler = Scheduler(self._lock, self._run, self.batching, lambda: self._table.unfinished)

    @property
    def session_count(self) -> int:
        return len(self._table)

    @property
    def reserved_bytes(self) -> int:
        """K/V memory of the sessions held."""
        return self._budget.used_bytes

    def prime(self, request: wire.PrimeRequest, gone: Gone = never_gone) -> wire.PrimeReply:
        """Prefill a prompt and draw the first token. Memory for the whole generation is reserved before that.

        gone: asked before each pass; a caller that has gone away gets no further one, and its session is freed.

        Raises:
            ProtocolError: what `check_prime` refuses; codes sessions_full, cache_size, cache_full, model_fault,
                cancelled, shutting_down.
        """
        check_prime(request, self.facts, self.limits)
        with self._lock:
            self._require_running()
            session = self._admit(request)
            call = PendingPrime(session, self.facts, self.batching.prefill_rows, gone)
            self._submit(call)
        try:
            return call.future.result()
        except HycoError:
            self.close(session.id)  # nobody knows its name
            raise

    def verify(
        self, session_id: str, round_number: int, request: wire.VerifyRequest, gone: Gone = never_gone
    ) -> wire.VerifyReply:
        """`start_round`, and its reply.

        Raises:
            ProtocolError: see there.
        """
        return self.start_round(session_id, round_number, request, gone).result()

    def start_round(
        self, session_id: str, round_number: int, request: wire.VerifyRequest, gone: Gone = never_gone
    ) -> "Future[wire.VerifyReply]":
        """Round `round_number` (1, 2, ...): judge the device's tree or the server's own chain, commit, hand off.

        The same round again gives the stored reply. A caller that has gone away before its pass changes nothing.

        Raises:
            ProtocolError: at once, or in the future: codes unknown_session, round_*, session_finished, length_differs,
                digest_differs, unsupported, those of `check_tree`, model_fault, cancelled, shutting_down.
        """
        with self._lock:
            self._require_running()
            self._table.expire()
            session = self._table.find(session_id)
            call = PendingRound(session, round_number, request, self.facts, self.limits, gone)
            self._submit(call)
        return call.future

    def close(self, session_id: str) -> None:
        """Forget a session and free its cache, after the pass in progress where it is in one; closing twice is
        closing once."""
        with self._lock:
            self._table.drop(session_id)

    def held(self) -> dict[str, Held]:
        """The sessions that have not been dropped, by id."""
        with self._lock:
            self._table.expire()
            return self._table.held()

    def expire(self) -> int:
        """Drop idle sessions; how many."""
        with self._lock:
            return self._table.expire()

    def passed_within(self, seconds: float) -> bool:
        """Has the model ended a pass in the last so many seconds?"""
        return self._now() - self._last_pass_s <= seconds

    def probe(self) -> "Future[Any]":
        """Ask the model for a pass over one token, in a session that nobody sees; done when it has made it. The one in
        flight where there is one: a model that hangs gathers no probes."""
        with self._lock:
            self._require_running()
            if self._probe is None or self._probe.done():
                session = Session(PROBE, self._budget)
                session.verifier = self._open_session()
                call = PendingPrime(session, self.facts, self.batching.prefill_rows, never_gone)
                self._probe = call.future
                self._submit(call)
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
            _deliver(call.future, shutting_down("the server is stopping, and this call's pass did not end in time"))
        return len(left)

    def _require_running(self) -> None:
        if self._stopping:
            raise shutting_down("the server is stopping")

    def _admit(self, request: wire.PrimeRequest) -> Session:
        """A session with its memory reserved; nothing is allocated yet. The lock is held."""
        self._table.expire()
        self._table.require_room()
        session = Session(request, self._budget)
        session.reserve(self._models.cache_bytes(session.positions), self._table.next_expiry_s())
        try:
            session.verifier = self._open_session()
        except Exception as error:
            session.finish()
            raise _refusal(error) from error
        self._table.add(session)
        return session

    def _submit(self, call: PendingRequest) -> None:
        """The lock is held."""
        call.session.calls += 1
        self._scheduler.submit(call)

    # --- on the model's thread

    def _run(self, batch: Sequence[PendingRequest]) -> list[PendingRequest]:
        """One pass; the calls that need another. The others are answered when their sessions rest."""
        with self._lock:
            for call in batch:
                call.session.busy = True
        ended: list[_Ended] = []
        try:
            return self._pass([call for call in batch if self._needs_pass(call, ended)], ended)
        finally:
            self._answer(batch, ended)
            self._draft_ahead(ended)

    def _answer(self, batch: Sequence[PendingRequest], ended: Sequence["_Ended"]) -> None:
        """Let the sessions of a pass rest, then tell the callers that need no further one."""
        with self._lock:
            for call in batch:
                self._table.rest(call.session)
            for call, _ in ended:
                call.session.calls -= 1
        for call, outcome in ended:
            _deliver(call.future, outcome)

    def _draft_ahead(self, ended: Sequence["_Ended"]) -> None:
        """While replies travel and nobody waits, draft what these sessions will ask for next; not after a refusal: the
        prompt of a PRIME that was cancelled has not been processed."""
        with self._lock:
            if self._scheduler.waiting:
                return
            wanted = {}
            for call, outcome in ended:
                free = not call.session.dropped and call.session.ahead is None and not isinstance(outcome, HycoError)
                if free and (chain := call.next_chain()) is not None:
                    wanted[call.session] = chain
                    call.session.busy = True
        if not wanted:
            return
        try:
            for session, drafted in self._draft(wanted).items():
                session.ahead = drafted
        except Exception as error:
            _log.error("drafting ahead failed, the next round tries again: %s", place_of(error))
        finally:
            with self._lock:
                for session in wanted:
                    self._table.rest(session)

    def _needs_pass(self, call: PendingRequest, ended: list["_Ended"]) -> bool:
        try:
            outcome = call.begin()
        except HycoError as refusal:
            outcome = refusal
        if outcome is not None:
            ended.append(_Ended(call, outcome))
        return outcome is None

    def _pass(self, calls: Sequence[PendingRequest], ended: list["_Ended"]) -> list[PendingRequest]:
        """Draft, forward, then judge each call by itself."""
        if not calls:
            return []
        try:
            parts = self._parts(calls)
            mark = self.clock.start()
            outputs = self._models.forward(parts)
            shared_ms = self.clock.elapsed_ms(mark)
            self._last_pass_s = self._now()
        except Exception as error:
            ended += self._faults(calls, error)
            return []
        row_ms = shared_ms / sum(part.rows for part in parts)
        judged: list[PendingRequest] = []
        again: list[PendingRequest] = []
        for call, part, logits in zip(calls, parts, outputs, strict=True):
            call.server_ms += part.rows * row_ms
            try:
                (judged if self._finish(call, logits) else again).append(call)
            except Exception as error:
                ended += self._faults([call], error)
        ended += self._replies(judged)
        return again

    def _replies(self, calls: Sequence[PendingRequest]) -> list["_Ended"]:
        """Of calls that need no further pass; with what the server drafts along."""
        wanted = {call: chain for call in calls if (chain := call.reply_chain()) is not None}
        failed: list[_Ended] = []
        try:
            for call, drafted in self._draft(wanted).items():
                call.along = drafted.chain
                call.server_ms += drafted.server_ms
        except Exception as error:
            failed = self._faults(list(wanted), error)
            calls = [call for call in calls if call not in wanted]
        return [*(_Ended(call, call.reply()) for call in calls), *failed]

    def _parts(self, calls: Sequence[PendingRequest]) -> list[Prefill | Check]:
        """What the pass computes, drafted by the server where that is its task."""
        drafted = self._draft({call: chain for call in calls if (chain := call.chain()) is not None})
        for call, own in drafted.items():
            call.server_ms += own.server_ms
        return [call.part(drafted[call].chain if call in drafted else ()) for call in calls]

    def _draft(self, wanted: Mapping[Key, Chain]) -> dict[Key, Ahead]:
        """Chains of the server's head, drafted together, by whom they are for."""
        if not wanted:
            return {}
        mark = self.clock.start()
        drafted = self._models.draft(list(wanted.values()))
        each_ms = self.clock.elapsed_ms(mark) / len(wanted)
        return {key: Ahead(chain, each_ms) for key, chain in zip(wanted, drafted, strict=True)}

    def _finish(self, call: PendingRequest, logits: np.ndarray) -> bool:
        """Judge one call; does it need no further pass."""
        mark = self.clock.start()
        done = call.finish(logits)
        call.server_ms += self.clock.elapsed_ms(mark)
        return done

    def _faults(self, calls: Sequence[PendingRequest], error: Exception) -> list["_Ended"]:
        """Drop the sessions of a pass, or of one call, that failed."""
        if not isinstance(error, HycoError):
            _log.error("the model failed; the %d sessions of this pass are dropped: %s", len(calls), place_of(error))
        with self._lock:
            for call in calls:
                self._table.drop(call.session.id)
        return [_Ended(call, _refusal(error)) for call in calls]


class _Ended(NamedTuple):
    """A call that needs no further pass: its reply, or why there is none."""

    call: PendingRequest
    outcome: Any


def _deliver(future: "Future[Any]", outcome: Any) -> None:
    """End a call; one that was given up when the engine stopped has ended already."""
    with contextlib.suppress(InvalidStateError):
        if isinstance(outcome, HycoError):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)


def _refusal(error: Exception) -> HycoError:
    """A fault of the model as what its callers hear."""
    if isinstance(error, HycoError):
        return error
    refusal = ProtocolError("model_fault", f"the model failed: {type(error).__name__}", PRIME_AGAIN)
    refusal.__cause__ = error
    return refusal
