"""The scheduler: which waiting calls share the next pass, and the one thread that makes the passes.

Calls wait in one queue. A pass takes them from its head: as many as a pass holds, one of a session at most, and of
prompts no more rows than a pass over prompts has. A prompt that needs further passes goes to the queue's end after
each, so rounds pass between its pieces. The head of the queue is always taken, hence nobody starves: a call waits for
at most as many passes as there were calls before it.

Which other sessions share a pass changes nothing in a session. A fault of the model drops the sessions whose pass it
was and no other.

Seen with 8 clients of the embedded family on one core: 100 tokens per second with passes of one session, 310 with
passes of at most 8, 350 with a batch window of 1 ms.
"""

import logging
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from hyco_export.core.numerics import MS_PER_S
from hyco_export.errors import HycoError, ProtocolError
from hyco_export.protocol import wire
from hyco_export.protocol.acceptance import Judged
from hyco_export.server.admission import PRIME_AGAIN, Batching
from hyco_export.server.interfaces import Chain, Check, Clock, DraftedChain, Prefill, VerifierModels, row_shares
from hyco_export.server.metrics import place_of
from hyco_export.server.session_table import SessionTable
from hyco_export.server.sessions import PendingRequest, Session

IDLE_S = 5.0  # without a call, then the thread ends; the next call starts another
Call = PendingRequest[Any]  # a PRIME or a round
Key = TypeVar("Key", Call, Session)
_log = logging.getLogger(__name__)


class Ended(NamedTuple):
    """A call that needs no further pass: its reply, or why there is none."""

    call: Call
    outcome: wire.PrimeReply | wire.VerifyReply | Exception


def choose(waiting: Sequence[Call], batching: Batching) -> list[Call]:
    """The calls of the next pass, in the order in which they wait."""
    chosen: list[Call] = []
    prompt_rows = 0
    for call in waiting:
        if len(chosen) == batching.sessions:
            break
        if any(other.session is call.session for other in chosen):
            continue
        if prompt_rows + call.prompt_rows > batching.prefill_rows and chosen:
            continue
        chosen.append(call)
        prompt_rows += call.prompt_rows
    return chosen


class Scheduler:
    """The queue and its thread.

    Args:
        lock: guards the queue and the table.
        table: the sessions; of those that are not finished a call can be expected.
        models: make the passes.
        clock: measures server_ms: a call's share of the passes it was in, from the draft to the draws, by rows, and its
            own verdict and hand-off; a chain that was drafted ahead counts in the round that it is for.
        batching: how calls share a pass.
        now: monotonic seconds.
    """

    def __init__(
        self,
        lock: threading.Lock,
        table: SessionTable,
        models: VerifierModels,
        clock: Clock,
        batching: Batching,
        now: Callable[[], float],
    ) -> None:
        self.last_pass_s = -math.inf
        self._lock = lock
        self._changed = threading.Condition(lock)
        self._table = table
        self._models = models
        self._clock = clock
        self._batching = batching
        self._now = now
        self._waiting: list[Call] = []
        self._running: Sequence[Call] = ()
        self._thread: threading.Thread | None = None

    def submit(self, call: Call) -> None:
        """Queue a call; the lock is held."""
        call.session.calls += 1
        self._waiting.append(call)
        if self._thread is None:
            self._thread = threading.Thread(target=self._loop, name="model", daemon=True)
            self._thread.start()
        else:
            self._changed.notify_all()

    def drain(self, patience_s: float) -> Sequence[Call]:
        """Wait until every call has been answered, at most `patience_s`; the calls that were not, which get no further
        pass. The lock is held, and released while waiting."""
        self._changed.wait_for(lambda: not (self._running or self._waiting), patience_s)
        left = [call for call in (*self._running, *self._waiting) if not call.future.done()]
        self._waiting = []
        return left

    def _loop(self) -> None:
        while True:
            with self._changed:
                if not self._changed.wait_for(lambda: self._waiting, IDLE_S):
                    self._thread = None
                    return
                self._wait_for_batch()
                batch = choose(self._waiting, self._batching)
                self._waiting = [call for call in self._waiting if call not in batch]
                self._running = batch
                for call in batch:
                    call.session.in_pass = True
            again = self._run(batch)
            with self._changed:
                self._waiting += again
                self._running = ()
                self._changed.notify_all()

    def _wait_for_batch(self) -> None:
        """The batch window: give other sessions a moment to join the pass."""
        deadline_s = time.monotonic() + self._batching.wait_ms / MS_PER_S
        while True:
            wanted = min(self._batching.sessions, self._table.unfinished)
            left_s = deadline_s - time.monotonic()
            if left_s <= 0 or len(choose(self._waiting, self._batching)) >= wanted:
                return
            self._changed.wait(left_s)

    def _run(self, batch: Sequence[Call]) -> Sequence[Call]:
        """One pass; the calls that need another. The others are answered when their sessions' pass has ended. An error
        goes to the callers of the pass, and the thread goes on."""
        ended: list[Ended] = []
        again: Sequence[Call] = ()
        try:
            again = self._pass([call for call in batch if self._needs_pass(call, ended)], ended)
        except Exception as error:
            done = {call for call, _ in ended}
            ended += [Ended(call, error) for call in batch if call not in done]
        self._answer(batch, ended)
        self._draft_ahead(ended)
        return again

    def _needs_pass(self, call: Call, ended: list[Ended]) -> bool:
        outcome: wire.PrimeReply | wire.VerifyReply | HycoError | None
        try:
            outcome = call.begin()
        except HycoError as refusal:
            outcome = refusal
        if outcome is not None:
            ended.append(Ended(call, outcome))
        return outcome is None

    def _pass(self, calls: Sequence[Call], ended: list[Ended]) -> list[Call]:
        """Draft, forward, look at the logits of all calls together, then decide each by itself."""
        if not calls:
            return []
        try:
            parts = self._parts(calls)
            mark = self._clock.start()
            outputs = self._models.forward(parts)
            asked = {call: query for call, logits in zip(calls, outputs, strict=True) if (query := call.query(logits))}
            judged = dict(zip(asked, self._models.look(list(asked.values())), strict=True))
            shared_ms = self._clock.elapsed_ms(mark)
            self.last_pass_s = self._now()
        except Exception as error:
            ended += self._faults(calls, error)
            return []
        done: list[Call] = []
        for call, share in zip(calls, row_shares(parts), strict=True):
            call.server_ms += share * shared_ms
            if call in judged and self._decide(call, judged[call], ended):
                done.append(call)
        ended += self._replies(done)
        return [call for call in calls if call not in judged]

    def _decide(self, call: Call, judged: Judged | ValueError, ended: list[Ended]) -> bool:
        """Whether a verdict could be made of what a call's rows hold; if not, its session is dropped."""
        try:
            if isinstance(judged, ValueError):
                raise judged
            mark = self._clock.start()
            call.finish(judged)
            call.server_ms += self._clock.elapsed_ms(mark)
        except Exception as error:
            ended += self._faults([call], error)
            return False
        return True

    def _parts(self, calls: Sequence[Call]) -> list[Prefill | Check]:
        """What the pass computes, drafted by the server where that is its task."""
        wanted = {call: chain for call in calls if (chain := call.chain()) is not None}
        drafted = self._draft(wanted) if wanted else {}
        parts: list[Prefill | Check] = []
        for call in calls:
            parts.append(call.part(drafted.get(call)))
        return parts

    def _draft(self, wanted: Mapping[Key, Chain]) -> dict[Key, DraftedChain]:
        """Chains of the server's head, drafted together, by whom they are for."""
        mark = self._clock.start()
        drafted = self._models.draft(list(wanted.values()))
        each_ms = self._clock.elapsed_ms(mark) / len(wanted)
        return {key: DraftedChain(chain, each_ms) for key, chain in zip(wanted, drafted, strict=True)}

    def _replies(self, calls: Sequence[Call]) -> list[Ended]:
        """Of calls that need no further pass, with what the server's head drafts to go with them."""
        wanted = {call: chain for call in calls if (chain := call.session.chain("reply")) is not None}
        ended: list[Ended] = []
        drafted: Mapping[Call, DraftedChain] = {}
        try:
            drafted = self._draft(wanted) if wanted else {}
        except Exception as error:
            ended += self._faults(list(wanted), error)
            calls = [call for call in calls if call not in wanted]
        for call in calls:
            ended.append(Ended(call, call.reply(drafted.get(call))))
        return ended

    def _faults(self, calls: Sequence[Call], error: Exception) -> list[Ended]:
        """Drop the sessions of a pass, or of one call, that failed."""
        if not isinstance(error, HycoError):
            _log.error("the model failed; the %d sessions of this pass are dropped: %s", len(calls), place_of(error))
        with self._lock:
            for call in calls:
                self._table.drop(call.session.id)
        return [Ended(call, model_fault(error)) for call in calls]

    def _answer(self, batch: Sequence[Call], ended: Sequence[Ended]) -> None:
        """Tell the callers that need no further pass, after the table knows that this one has ended."""
        with self._lock:
            for call in batch:
                self._table.end_pass(call.session)
            for call, _ in ended:
                call.session.calls -= 1
        for call, outcome in ended:
            call.answer(outcome)

    def _draft_ahead(self, ended: Sequence[Ended]) -> None:
        """While replies travel and no call waits, draft what these sessions will ask for next; not after a refusal: the
        prompt of a PRIME that was cancelled has not been processed."""
        with self._lock:
            if self._waiting:
                return
            wanted: dict[Session, Chain] = {}
            for call, outcome in ended:
                free = not call.session.dropped and not isinstance(outcome, Exception)
                if free and (chain := call.session.chain("server")) is not None:
                    wanted[call.session] = chain
                    call.session.in_pass = True
        if not wanted:
            return
        try:
            for session, drafted in self._draft(wanted).items():
                session.drafted = drafted
        except Exception as error:
            _log.error("drafting ahead failed, the next round tries again: %s", place_of(error))
        finally:
            with self._lock:
                for session in wanted:
                    self._table.end_pass(session)


def model_fault(error: Exception) -> HycoError:
    """A fault of the model as the refusal that its callers get."""
    if isinstance(error, HycoError):
        return error
    refusal = ProtocolError("model_fault", f"the model failed: {type(error).__name__}", PRIME_AGAIN)
    refusal.__cause__ = error
    return refusal
