"""Time with waits in it that nobody waits for: real time goes on, and what a link would have taken is added."""

import time
from collections.abc import Callable


class SkippingClock:
    """Seconds of real work plus the waits that were skipped. Callable like `time.perf_counter`.

    It is one thread's time: what overlaps a wait (drafting while the reply is in flight) needs `WaitingClock`.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._skipped_s = 0.0

    def __call__(self) -> float:
        return self._now() + self._skipped_s

    def wait(self, seconds: float) -> None:
        self._skipped_s += max(0.0, seconds)


class WaitingClock:
    """Real time: a link's waits are slept."""

    def __call__(self) -> float:
        return time.perf_counter()

    def wait(self, seconds: float) -> None:
        time.sleep(max(0.0, seconds))


LinkClock = SkippingClock | WaitingClock
