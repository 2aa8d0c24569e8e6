"""Peaks of memory: what a block allocates and frees is seen, what came before is not, children count by themselves."""

import subprocess
import sys

from hyco_export.core.memory import measured

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
