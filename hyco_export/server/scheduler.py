"""The scheduler: which waiting calls share the next pass, and the one thread that makes the passes.

Calls wait in one queue. A pass takes them from its head: as many as a pass holds, one of a session at most, and of
prompts no more rows than a pass over prompts has. A prompt that needs further passes goes to the queue's end after
each, so rounds pass between its pieces. The head of the queue is always taken, hence nobody starves: a call waits for
at most as many passes as there were calls before it.

Seen with 8 clients of the embedded family on one core: 100 tokens per second with passes of one session, 310 with
passes of at most 8, 350 with a batch window of 1 ms.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from typing import Any, Protocol

import msgspec
import numpy as np

from hyco_export.core.numerics import MS_PER_S
from hyco_export.server.interfaces import Chain, Check, Prefill

IDLE_S = 5.0  # without a call, then the thread ends; the next call starts another


class Batching(msgspec.Struct, frozen=True):
    """How calls share a pass."""

    sessions: int = 8  # in one pass, at most
    wait_ms: float = 1.0  # batch window: a pass waits so long for further sessions, while there are any
    prefill_rows: int = 256  # rows of prompts in one pass, at most


class Waiting(Protocol):
    """A call that waits for a pass."""

    @property
    def session(self) -> object: ...

    @property
    def prompt_rows(self) -> int:
        """Rows of a prompt that its next pass needs; 0 for a round."""
        ...

    @property
    def future(self) -> "Future[Any]": ...


def choose(waiting: Sequence[Waiting], batching: Batching) -> list[Waiting]:
    """The calls of the next pass, in the order in which they wait."""
    chosen: list[Waiting] = []
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
        lock: guards the queue; `expected` is called with it held.
        run: makes one pass; returns the calls that need another. Every other call's future is done after it.
        batching: how calls share a pass.
        expected: sessions that may call at all.
    """

    def __init__(
        self,
        lock: threading.Lock,
        run: Callable[[Sequence[Any]], Sequence[Any]],
        batching: Batching,
        expected: Callable[[], int],
    ) -> None:
        self._changed = threading.Condition(lock)
        self._run = run
        self._batching = batching
        self._expected = expected
        self._waiting: list[Any] = []
        self._running: Sequence[Any] = ()
        self._thread: threading.Thread | None = None

    def submit(self, call: Waiting) -> None:
        """Queue a call; the lock is held."""
        self._waiting.append(call)
        if self._thread is None:
            self._thread = threading.Thread(target=self._loop, name="model", daemon=True)
            self._thread.start()
        else:
            self._changed.notify_all()

    @property
    def waiting(self) -> bool:
        """Does a call wait for a pass; the lock is held."""
        return bool(self._waiting)

    def drain(self, patience_s: float) -> Sequence[Any]:
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
            again = self._guarded(batch)
            with self._changed:
                self._waiting += again
                self._running = ()
                self._changed.notify_all()

    def _wait_for_batch(self) -> None:
        """The batch window: give other sessions a moment to join the pass."""
        deadline_s = time.monotonic() + self._batching.wait_ms / MS_PER_S
        while True:
            wanted = min(self._batching.sessions, self._expected())
            left_s = deadline_s - time.monotonic()
            if left_s <= 0 or len(choose(self._waiting, self._batching)) >= wanted:
                return
            self._changed.wait(left_s)

    def _guarded(self, batch: Sequence[Any]) -> Sequence[Any]:
        """`run`; whoever calls hears of a fault in it, and the thread goes on."""
        try:
            return self._run(batch)
        except Exception as error:
            for call in batch:
                with contextlib.suppress(InvalidStateError):  # it was answered before the fault, or given up
                    call.future.set_exception(error)
            return ()


class SequentialModels:
    """`VerifierModels` for sessions that share nothing: in a pass they compute their parts one after the other.

    Args:
        position_bytes: memory that a session takes for each of its positions.
    """

    def __init__(self, position_bytes: int = 0) -> None:
        self._position_bytes = position_bytes

    def cache_bytes(self, positions: int) -> int:
        return positions * self._position_bytes

    def draft(self, chains: Sequence[Chain]) -> list[tuple[int, ...]]:
        return [chain.session.draft(chain.root, chain.steps, chain.restricted) for chain in chains]

    def forward(self, parts: Sequence[Prefill | Check]) -> list[np.ndarray]:
        return [
            part.session.prime(part.ids)
            if isinstance(part, Prefill)
            else part.session.verify(part.root, part.tokens, part.parents).logits
            for part in parts
        ]
