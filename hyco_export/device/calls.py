"""How calls are made: repeated while the server is away, and overlapped with drafting.

Every call of the protocol may be repeated. Rounds are numbered and answered once, closing twice is closing once, and a
PRIME that is sent again names the attempt before it: the server closes that session and draws the same token.
"""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TypeVar

import msgspec

from hyco_export.core.numerics import MS_PER_S
from hyco_export.device.client import as_attempt
from hyco_export.device.interfaces import Transport
from hyco_export.errors import ProtocolError, UnreachableError
from hyco_export.protocol import wire
from hyco_export.protocol.wire import Traffic

Reply = TypeVar("Reply")
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 5.0  # doubled from one to the other
SOON_CODES = ("shutting_down", "sessions_full", "cache_full", "connections_full", "rate")  # refusals that time cures


class RetryingTransport:
    """Repeats the calls of `inner` until an answer comes or `patience_s` is over.

    Args:
        inner: does the call, with short retries of its own.
        patience_s: how long a call may go without an answer.
        clock: seconds.
        pause: waits that many seconds between tries.
        still_there: asked before each pause; raises where nobody will start the server again.
    """

    def __init__(
        self,
        inner: Transport,
        patience_s: float,
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[float], None] = time.sleep,
        still_there: Callable[[], None] | None = None,
    ) -> None:
        self._inner = inner
        self._patience_s = patience_s
        self._clock = clock
        self._pause = pause
        self._repeats = 0  # of the last call: tries before the last one
        self._still_there = still_there or (lambda: None)

    @property
    def traffic(self) -> Traffic:
        traffic = self._inner.traffic
        return msgspec.structs.replace(traffic, repeats=traffic.repeats + self._repeats)

    def info(self) -> wire.ServerInfo:
        return self._repeat(self._inner.info)

    def prime(self, request: wire.PrimeRequest) -> wire.PrimeReply:
        named = as_attempt(request)
        return self._repeat(lambda: self._inner.prime(named))

    def verify(self, session: str, round_number: int, request: wire.VerifyRequest) -> wire.VerifyReply:
        return self._repeat(lambda: self._inner.verify(session, round_number, request))

    def close_session(self, session: str) -> None:
        self._inner.close_session(session)  # not repeated: an unclosed session expires on the server

    def _repeat(self, call: Callable[[], Reply]) -> Reply:
        """The call's result; raises what its last try raised, or what `still_there` does."""
        end_s = self._clock() + self._patience_s
        pause_s = FIRST_PAUSE_S
        self._repeats = 0
        while True:
            try:
                return call()
            except (UnreachableError, ProtocolError) as error:
                hopeless = isinstance(error, ProtocolError) and error.code not in SOON_CODES
                if hopeless or self._clock() + pause_s > end_s:
                    raise
            self._repeats += 1 + self._inner.traffic.repeats
            self._still_there()
            self._pause(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


class Overlap:
    """Drafts in the caller's thread while a call runs on another: one thread a generation, one call at a time.

    Args:
        now: seconds of real time: the driver's clock may skip what a modelled link takes, in the middle of a pass.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._caller: ThreadPoolExecutor | None = None

    def call(self, call: Callable[[], Reply], passes: Iterator[None]) -> tuple[Reply, float]:
        """The call's reply, and the milliseconds spent on passes until the reply arrived or no pass was left.

        Raises:
            Whatever the call or a pass raises. If a pass fails, the reply is awaited first: the connection carries one
            call at a time.
        """
        if self._caller is None:
            self._caller = ThreadPoolExecutor(max_workers=1, thread_name_prefix="reply")
        reply: Future[Reply] = self._caller.submit(call)
        start_s = end_s = self._now()
        try:
            while not reply.done() and next(passes, self) is not self:
                end_s = self._now()
        finally:
            wait([reply])
        return reply.result(), (end_s - start_s) * MS_PER_S

    def close(self) -> None:
        """End the thread; a later call starts another."""
        if self._caller is not None:
            self._caller.shutdown()
            self._caller = None
