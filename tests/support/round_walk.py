"""Which files of the package a piece of work passes through, and how often it turns from one to another.

A figure of structure: whoever follows the work opens so many files, and turns from one to the next so many times.
"""

import itertools
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import hyco_export

ROOT = Path(hyco_export.__file__).parent


class Walk(NamedTuple):
    """path: the files of the functions that were called, in order, each once in a row."""

    path: tuple[str, ...]

    @property
    def files(self) -> frozenset[str]:
        return frozenset(self.path)

    @property
    def switches(self) -> int:
        return len(self.path) - 1


def walks(work: Callable[[Callable[[], None]], object]) -> list[Walk]:
    """The walks between the marks that `work` sets: it calls the function that it is given where one begins.

    Threads are counted as one, so no two of them may work at the same time.
    """
    called: list[str] = []
    marks: list[int] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(f"{ROOT}/"):
            called.append(str(Path(frame.f_code.co_filename).relative_to(ROOT)))

    before = sys.getprofile()
    threading.setprofile(note)  # of threads that start from now on
    sys.setprofile(note)
    try:
        work(lambda: marks.append(len(called)))
    finally:
        sys.setprofile(before)
        threading.setprofile(before)  # type: ignore[arg-type]  # None, where nobody measures
    parts = (called[start:end] for start, end in itertools.pairwise(marks))
    return [Walk(tuple(name for name, _ in itertools.groupby(part))) for part in parts]
