"""Using the time in which a reply is on its way: the call runs on a thread, drafting goes on in the caller's.

Between two passes it looks for the reply and stops drafting when it is there (HyCo, §2, proactive drafting). Knows
neither calls nor drafters.
"""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TypeVar

from hyco_export.core.units import MS_PER_S

Reply = TypeVar("Reply")


class WhileWaiting:
    """One thread for the calls of one generation; no two calls at a time, as a transport wants it.

    Args:
        now: seconds of real time: the driver's clock may skip what a modelled link takes, in the middle of a pass.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._caller: ThreadPoolExecutor | None = None

    def call(self, call: Callable[[], Reply], passes: Iterator[None]) -> tuple[Reply, float]:
        """The call's reply, and the milliseconds of the passes, which are made until it is there or they end.

        Raises:
            Whatever the call raises, or a pass. A pass that fails waits for the reply first: the line is not free
            before.
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
