"""Traces as JSONL files: a generation's own record, then one record for every PRIME and every round.

A benchmark keeps one file a system (`TraceStore`), written so that a run that was killed resumes where it was.
"""

import os
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from hyco_export.core.files import pretty_json
from hyco_export.errors import ArtifactError, HycoError, counted
from hyco_export.evaluate.metrics import without_evidence
from hyco_export.protocol.trace import GenerationTrace, from_lines, to_lines


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
    """Make the folder for traces, before a run whose traces would otherwise be lost.

    Raises:
        OSError: it cannot be made or written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder):
        pass


def read_traces(path: Path) -> tuple[GenerationTrace, ...]:
    """The generations of a file.

    Raises:
        HycoError: no such file, or not a trace.
    """
    hint = "give a JSONL file that `validate --traces`, `bench` or `evaluate` wrote"
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


PLAN_FILE, PROGRESS_FILE = "plan.json", "progress.json"
ANOTHER_FOLDER = "give another --out, or remove the folder"


class TraceStore:
    """The folder of one benchmark.

    Args:
        folder: made when it is missing.
        plan: says what is run; a folder holds generations of one plan only.
        systems: names of the systems, one file each.

    Raises:
        ArtifactError: the folder holds another plan's generations, or files that are shorter than was recorded.
    """

    def __init__(self, folder: Path, plan: msgspec.Struct, systems: Sequence[str]) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._require_plan(plan)
        self._sizes = dict.fromkeys(systems, 0) | self._recorded_sizes()
        for system, size in self._sizes.items():
            self._cut(system, size)
        self._traces = {system: self._read(system) for system in systems}

    def traces(self, system: str) -> Sequence[GenerationTrace]:
        """Finished generations, in the order in which they were made; without p~, which is as large as all the rest
        and stands in the files."""
        return self._traces[system]

    def holds(self, system: str, prompt_id: str, seed: int) -> bool:
        """Is this generation stored."""
        return any(trace.prompt_id == prompt_id and trace.seed == seed for trace in self._traces[system])

    def add(self, trace: GenerationTrace) -> None:
        """Keep a finished generation."""
        system = trace.system
        lines = trace_bytes(trace)
        with self.path(system).open("ab") as stream:
            stream.write(lines)
            stream.flush()
            os.fsync(stream.fileno())
        self._sizes[system] += len(lines)
        self._replace(PROGRESS_FILE, self._sizes)
        self._traces[system].append(without_evidence(trace))

    def path(self, system: str) -> Path:
        """The system's JSONL file."""
        return self.folder / f"{system}.jsonl"

    def _require_plan(self, plan: msgspec.Struct) -> None:
        path = self.folder / PLAN_FILE
        if not path.exists():
            self._replace(PLAN_FILE, plan)
            return
        wanted, held = _fields(msgspec.json.decode(msgspec.json.encode(plan))), _fields(_read_json(path))
        differing = sorted(key for key in {*wanted, *held} if wanted.get(key) != held.get(key))
        if differing:
            seen = "; ".join(f"{key} is {held.get(key)} there, {wanted.get(key)} here" for key in differing)
            raise ArtifactError(f"{self.folder} holds another benchmark: {seen}", ANOTHER_FOLDER)

    def _recorded_sizes(self) -> dict[str, int]:
        path = self.folder / PROGRESS_FILE
        return {str(name): int(size) for name, size in _read_json(path).items()} if path.exists() else {}

    def _cut(self, system: str, size: int) -> None:
        """Cut a file behind the last recorded generation: a killed run may have written part of another."""
        path = self.path(system)
        found = path.stat().st_size if path.exists() else 0
        if found < size:
            raise ArtifactError(f"{path} has {found} of {size} recorded bytes", ANOTHER_FOLDER)
        if found > size:
            os.truncate(path, size)

    def _read(self, system: str) -> list[GenerationTrace]:
        path = self.path(system)
        if not path.exists():
            return []
        try:
            with path.open("rb") as file:
                return [without_evidence(trace) for trace in from_lines(file)]
        except (msgspec.DecodeError, ValueError) as error:
            raise ArtifactError(f"{path} cannot be read: {error}", ANOTHER_FOLDER) from error

    def _replace(self, name: str, value: Any) -> None:
        draft = self.folder / f"{name}.draft"
        draft.write_bytes(pretty_json(value))
        draft.replace(self.folder / name)


def kept_generations(folder: Path) -> str:
    """How many finished generations a benchmark's folder holds, in words; "" for none."""
    count = 0
    with suppress(OSError, HycoError, ValueError):  # a damaged folder is named when it is opened
        for system, size in _read_json(folder / PROGRESS_FILE).items():
            with (folder / f"{system}.jsonl").open("rb") as file:
                count += sum(1 for _ in from_lines(file.read(size).splitlines()))
    return f"{counted(count, 'generation')} in {folder}" if count else ""


def _fields(values: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """Plain values by their names, those of inner structs as `outer.inner`."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        found |= _fields(value, f"{above}{name}.") if isinstance(value, Mapping) else {above + name: value}
    return found


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise ArtifactError(f"{path} cannot be read: {error}", ANOTHER_FOLDER) from error
