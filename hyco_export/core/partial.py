"""What an unfinished build has already: units of work whose files are whole, so that a killed build can go on.

A unit is finished when its receipt lies in the build's work folder and every file that the receipt names has the
recorded size and sha256. Files and receipts are written beside their place and renamed, so that a kill at any moment
leaves a unit finished or not begun. Knows files and digests; not what a unit is. The work folder is no part of the
artifact: `core.artifact.publish` removes it.
"""

import hashlib
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from hyco_export.core.artifact import WORK_FOLDER, FileRecord, file_digest

RECEIPT_SUFFIX = ".receipt.json"


class Receipt(msgspec.Struct, frozen=True):
    """One finished unit: its files by path inside the build folder, and what its maker wants to remember (JSON)."""

    files: dict[str, FileRecord]
    note: Any = None


class PartialBuild:
    """The finished units of one build folder. Several processes may use it for different units.

    Args:
        build_dir: the build folder; its work folder is made when it is missing.
    """

    def __init__(self, build_dir: Path) -> None:
        self.build_dir = build_dir
        self._work = build_dir / WORK_FOLDER
        self._work.mkdir(exist_ok=True)

    @contextmanager
    def place(self, name: str) -> Iterator[Path]:
        """A path to write to; the file is renamed to `name` (inside the build folder) when the block ends well."""
        target = self.build_dir / name
        target.parent.mkdir(parents=True, exist_ok=True)
        label = hashlib.sha256(name.encode()).hexdigest()[:16]
        for left in self._work.glob(f"{label}.*.draft"):  # of a killed process
            left.unlink(missing_ok=True)
        draft = (
            self._work / f"{label}.{os.getpid()}.draft"
        )  # a process that outlived its launch may still write its own
        try:
            yield draft
            draft.replace(target)
        finally:
            draft.unlink(missing_ok=True)

    def finish(self, unit: str, names: Sequence[str], note: Any = None) -> None:
        """Write the receipt of a unit whose files are all in place."""
        paths = {name: self.build_dir / name for name in names}
        records = {name: FileRecord(file_digest(path), path.stat().st_size) for name, path in paths.items()}
        with self.place(f"{WORK_FOLDER}/{unit}{RECEIPT_SUFFIX}") as draft:
            draft.write_bytes(msgspec.json.encode(Receipt(records, note)))

    def finished(self, unit: str) -> Receipt | None:
        """The receipt of a unit whose files are whole; None when there is none, or a file is not what it names."""
        try:
            receipt = msgspec.json.decode(self._receipt(unit).read_bytes(), type=Receipt)
        except (OSError, msgspec.DecodeError):
            return None
        whole = all(_is_whole(self.build_dir / name, record) for name, record in receipt.files.items())
        return receipt if whole else None

    def forget(self, unit: str, names: Sequence[str]) -> None:
        """Remove a unit: its receipt first, then its files."""
        self._receipt(unit).unlink(missing_ok=True)
        for name in names:
            (self.build_dir / name).unlink(missing_ok=True)

    def _receipt(self, unit: str) -> Path:
        return self._work / f"{unit}{RECEIPT_SUFFIX}"


def _is_whole(path: Path, record: FileRecord) -> bool:
    return path.is_file() and path.stat().st_size == record.size_bytes and file_digest(path) == record.sha256
