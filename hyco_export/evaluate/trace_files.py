"""Traces as JSONL files: a generation's own record, then one record for every PRIME and every round.

Knows files; what the records say is `runtime.trace`.
"""

import tempfile
from collections.abc import Iterable
from pathlib import Path

import msgspec

from hyco_export.errors import HycoError
from hyco_export.runtime.trace import GenerationTrace, from_lines, to_lines


def trace_bytes(trace: GenerationTrace) -> bytes:
    """The lines of one generation."""
    return b"".join(line + b"\n" for line in to_lines(trace))


def write_traces(path: Path, traces: Iterable[GenerationTrace]) -> None:
    """One file of generations, replacing what is there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        for trace in traces:
            file.write(trace_bytes(trace))


def require_writable(folder: Path) -> None:
    """Make the folder that traces will go to.

    Raises:
        OSError: it cannot be made or written: said before a run whose traces would be lost.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder):
        pass


def read_traces(path: Path) -> tuple[GenerationTrace, ...]:
    """The generations of a file.

    Raises:
        HycoError: no such file, or not a trace.
    """
    hint = "give a JSONL file that `validate --traces` wrote"
    try:
        with path.open("rb") as file:
            traces = tuple(from_lines(line for line in file if line.strip()))
    except OSError as error:
        raise HycoError(f"{path} cannot be read: {error.strerror}", hint) from error
    except (msgspec.DecodeError, ValueError) as error:
        raise HycoError(f"{path} is not a trace: {error}", hint) from error
    if not traces:
        raise HycoError(f"{path} holds no generation", hint)
    return traces
