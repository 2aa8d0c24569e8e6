"""Peaks of memory of a block and of its children; Ctrl-C during a collection is neither lost nor cuts it short."""

import gc
import signal
import subprocess
import sys

import pytest

from hyco_export.core.memory import measured, release_freed

MEGABYTE = 1 << 20


def fill(megabytes: int) -> int:
    return len(b"x" * (megabytes * MEGABYTE))


def test_a_freed_allocation_is_in_the_peak() -> None:
    with measured() as idle:
        pass
    with measured() as busy:
        fill(200)
    assert 190 * MEGABYTE < busy.own_bytes - idle.own_bytes < 230 * MEGABYTE


def test_the_peak_of_earlier_work_is_not() -> None:
    fill(200)
    with measured() as after:
        pass
    with measured() as busy:
        fill(200)
    assert busy.own_bytes - after.own_bytes > 150 * MEGABYTE


def test_children_are_counted_apart() -> None:
    script = "import time; held = b'x' * (100 << 20); time.sleep(0.5)"
    with measured() as peak:
        subprocess.run([sys.executable, "-c", script], check=True)
    assert 100 * MEGABYTE < peak.children_bytes < 160 * MEGABYTE


def test_the_total_is_of_one_moment() -> None:
    script = "import time; held = b'x' * (200 << 20); time.sleep(0.5)"
    with measured() as apart:
        fill(200)
        subprocess.run([sys.executable, "-c", script], check=True)
    assert apart.total_bytes < apart.own_bytes + apart.children_bytes - 100 * MEGABYTE
    assert apart.total_bytes >= max(apart.own_bytes, apart.children_bytes)
    held = b"x" * (200 * MEGABYTE)
    with measured() as together:
        subprocess.run([sys.executable, "-c", script], check=True)
    assert together.total_bytes > len(held) + 200 * MEGABYTE
    assert together.total_bytes <= together.own_bytes + together.children_bytes


class Interrupting:
    """Its finalizer is where the signal arrives."""

    def __init__(self) -> None:
        self.circle = self

    def __del__(self) -> None:
        signal.raise_signal(signal.SIGINT)


def test_an_interrupt_inside_a_finalizer_is_not_lost() -> None:
    usual = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        gc.disable()
        Interrupting()
        with pytest.raises(KeyboardInterrupt):
            release_freed()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        gc.enable()
        signal.signal(signal.SIGINT, usual)


def test_other_handlers_are_left_alone() -> None:
    seen = []
    usual = signal.signal(signal.SIGINT, lambda number, frame: seen.append(number))
    try:
        Interrupting()
        release_freed()
        assert seen == [signal.SIGINT]
    finally:
        signal.signal(signal.SIGINT, usual)
