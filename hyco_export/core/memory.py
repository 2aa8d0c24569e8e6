"""Peak memory of a piece of work: of this process, of its children and of both; and returning freed memory.

The kernel keeps a process's peak since it started. It is reset before the work where that is allowed
(`/proc/self/clear_refs`); otherwise, and for children and for the sum, the largest of regular samples is the peak. A
page that several processes share counts in each of them.
"""

import contextlib
import ctypes
import gc
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import psutil

SAMPLE_INTERVAL_S = 0.1
RESET_PEAK = "5"  # proc(5): writing 5 to clear_refs resets the peak resident set size
SETTLED_S = 0.2  # a younger child may still be the fork of its parent, whose pages it shares
BYTES_PER_KB = 1024
PROC_SELF = Path("/proc/self")


@dataclass
class PeakMemory:
    """Peaks in bytes, complete once `measured` has ended. Own pages include mapped files that were touched."""

    own_bytes: int = 0
    children_bytes: int = 0  # of all descendants at one moment
    total_bytes: int = 0  # of this process and all descendants at one moment: the peaks above may be minutes apart


@contextlib.contextmanager
def measured() -> Iterator[PeakMemory]:
    """Measure the block."""
    peak = PeakMemory()
    resettable = _reset_peak()
    stop = threading.Event()
    sampler = threading.Thread(target=_sample, args=(peak, stop), name="memory-sampler", daemon=True)
    sampler.start()
    try:
        yield peak
    finally:
        stop.set()
        sampler.join()
        _take(peak)
        if resettable:
            peak.own_bytes = max(peak.own_bytes, own_peak_bytes())
        peak.total_bytes = max(peak.total_bytes, peak.own_bytes)


def _sample(peak: PeakMemory, stop: threading.Event) -> None:
    while not stop.wait(SAMPLE_INTERVAL_S):
        _take(peak)


def _take(peak: PeakMemory) -> None:
    process = psutil.Process()
    settled = [child for child in process.children(recursive=True) if _age_s(child) > SETTLED_S]
    own_bytes, children_bytes = _resident_bytes(process), sum(map(_resident_bytes, settled))
    peak.own_bytes = max(peak.own_bytes, own_bytes)
    peak.children_bytes = max(peak.children_bytes, children_bytes)
    peak.total_bytes = max(peak.total_bytes, own_bytes + children_bytes)


def _reset_peak() -> bool:
    try:
        (PROC_SELF / "clear_refs").write_text(RESET_PEAK)
    except OSError:
        return False
    return True


def own_peak_bytes() -> int:
    """Peak resident set of this process by the kernel (VmHWM); 0 on systems without /proc."""
    if not PROC_SELF.exists():
        return 0
    for line in (PROC_SELF / "status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * BYTES_PER_KB
    return 0


def _age_s(process: psutil.Process) -> float:
    return time.time() - float(process.create_time())


def _resident_bytes(process: psutil.Process) -> int:
    """0 for a process that has ended."""
    try:
        return int(process.memory_info().rss)
    except psutil.NoSuchProcess:
        return 0


def release_freed() -> None:
    """Collect garbage and return freed memory to the system; the second part needs glibc and is skipped without it."""
    with _interrupts_held():
        gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Delay Ctrl-C until the block ends: raised inside a finalizer, as a collection calls them, it would be lost."""
    held: list[int] = []

    def hold(number: int, frame: FrameType | None) -> None:
        held.append(number)

    usual = signal.getsignal(signal.SIGINT)
    if usual is not signal.default_int_handler or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, hold)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, usual)
    if held:
        raise KeyboardInterrupt
