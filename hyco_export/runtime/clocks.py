"""What `server_ms` is measured with on a CPU. `cuda_clock` has the one for GPUs.

A clock measures one call's work on the thread that does it. Names travel as `ServerInfo.clock`.
"""

import time
from typing import Any, Protocol

NS_PER_MS = 1e6


class Clock(Protocol):
    """A stopwatch for work on the current thread."""

    @property
    def name(self) -> str: ...

    def start(self) -> Any:
        """A mark to measure from."""
        ...

    def elapsed_ms(self, mark: Any) -> float:
        """Milliseconds since `mark`, queued device work included."""
        ...


class ThreadCpuClock:
    """CPU time of the thread: waits and other sessions do not count. Right where torch uses one thread."""

    name = "thread-cpu"

    def start(self) -> int:
        return time.thread_time_ns()

    def elapsed_ms(self, mark: int) -> float:
        return (time.thread_time_ns() - mark) / NS_PER_MS


class ProcessCpuClock:
    """CPU time of all threads of the process: right where torch works with several threads, which the thread's own
    clock does not see. The loop that reads requests is in it too, some tenths of a millisecond at most."""

    name = "process-cpu"

    def start(self) -> int:
        return time.process_time_ns()

    def elapsed_ms(self, mark: int) -> float:
        return (time.process_time_ns() - mark) / NS_PER_MS
