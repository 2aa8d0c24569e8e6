"""What `server_ms` is measured with. Knows how to read three clocks; torch only inside the CUDA one.

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


class CudaClock:
    """CUDA events on the current stream of `device`, from the first kernel's launch to the last one's end."""

    name = "cuda-events"

    def __init__(self, device: Any) -> None:
        import torch

        self._cuda = torch.cuda
        self._device = device

    def start(self) -> Any:
        return self._record()

    def elapsed_ms(self, mark: Any) -> float:
        end = self._record()
        end.synchronize()
        return float(mark.elapsed_time(end))

    def _record(self) -> Any:
        event = self._cuda.Event(enable_timing=True)
        event.record(self._cuda.current_stream(self._device))
        return event


def clock_for(device_type: str, threads: int, device: Any = None) -> Clock:
    """The clock that sees all the work of a model on this device, computed by this many threads."""
    if device_type == "cuda":
        return CudaClock(device)
    return ThreadCpuClock() if threads == 1 else ProcessCpuClock()
