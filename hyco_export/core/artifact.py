"""Artifacts: folders whose `manifest.json` was written last, with the sha256 of every other file in it.

Publishing (temporary folder, hashes, manifest, rename), verifying, and the finished units of an unfinished build, so
that a killed build can go on (`PartialBuild`). A folder without a manifest does not count as an artifact.
"""

import hashlib
import os
import shutil
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import msgspec

from hyco_export.core.files import write_json
from hyco_export.errors import ArtifactError, StrayFileError

MANIFEST_NAME = "manifest.json"
WORK_FOLDER = ".work"  # in a build folder: what a stage keeps to resume after a kill; not part of the artifact
RECEIPT_SUFFIX = ".receipt.json"
DEBRIS = (".DS_Store", "._*", "Thumbs.db", "desktop.ini", ".directory", ".nfs*", ".fuse_hidden*")
STRAY_HINT = "move or remove it: the artifact is built anew only where one of its own files is damaged"

# names in a run folder: stages with an artifact each, and files that one stage writes and another room reads
CAPTURE = "capture"
QAT_HEAD = "qat-head"
KEEPSET = "build-keepset"
HEAD = "convert-head"
SLM = "convert-slm"
COMPILE = "compile"
FINAL_NORM_FILE = "final_norm.safetensors"  # in CAPTURE
HEAD_SAMPLES_FILE = "head_samples.safetensors"  # in HEAD
SLM_SINK_FILE = "slm_opening.safetensors"  # in SLM, where the spec names an opening token
ENCODINGS_FILE = "encodings.json"  # in HEAD and SLM
SLM_SAMPLES_FILE = "slm_samples.safetensors"  # in SLM


def artifact_name(stage: str, target: str | None = None) -> str:
    """Folder of a stage's artifact; with the target's name where the target changes the bytes."""
    return stage if target is None else f"{stage}@{target}"


class FileRecord(msgspec.Struct, frozen=True):
    """The sha256 and size that one file must have."""

    sha256: str
    size_bytes: int


class Manifest(msgspec.Struct, frozen=True):
    """What an artifact was made from (`key` sums it up), its files, and what was measured while making it."""

    stage: str
    revision: int
    key: str
    config: Any
    inputs: dict[str, str]  # stage -> key
    sources: dict[str, str]  # checkpoint or data file -> digest
    files: dict[str, FileRecord]
    metrics: dict[str, Any]
    versions: dict[str, str]  # library -> version
    wall_s: float  # of the process that finished it
    origins: dict[str, str] = {}  # checkpoint -> Hub id and commit, or the folder's reference in the recipe
    peak_rss_bytes: int = 0  # of the process that built it; 0 in manifests of older versions
    children_rss_bytes: int = 0  # of its child processes together, at their peak
    total_rss_bytes: int = 0  # of all of them at one moment: what the machine must have
    input_files: dict[str, str] = {}  # stage -> digest of the files that were read (`Manifest.files_digest`)

    @property
    def size_bytes(self) -> int:
        """Bytes of all files but the manifest."""
        return sum(record.size_bytes for record in self.files.values())

    @property
    def files_digest(self) -> str:
        """sha256 over the names and contents of all files: a key says what was asked for, this what was made."""
        return content_digest({name: record.sha256 for name, record in self.files.items()})


def file_digest(path: Path) -> str:
    """sha256 of a file's content, hex."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def content_digest(content: Any) -> str:
    """sha256 of plain values, hex; independent of the order of a mapping's keys."""
    return hashlib.sha256(msgspec.json.encode(content, order="sorted")).hexdigest()


def artifact_key(
    stage: str, revision: int, config: msgspec.Struct, inputs: Mapping[str, str], sources: Mapping[str, str]
) -> str:
    """The identity of an artifact: equal keys mean equal bytes, made with the same libraries."""
    return content_digest([stage, revision, msgspec.to_builtins(config), dict(inputs), dict(sources)])


def publish(build_dir: Path, folder: Path, manifest: Manifest) -> None:
    """Hash the files of `build_dir`, write its manifest, and move it to `folder`, replacing what is there.

    A kill at any moment leaves the old artifact, no artifact, or the new one; never a half-written one. The stage's
    resume data goes only after the manifest is on disk: a full disk costs no finished work.
    """
    (build_dir / MANIFEST_NAME).unlink(missing_ok=True)  # left by a publishing that was killed before the rename
    records = {}
    for path in _files(build_dir):
        records[str(path.relative_to(build_dir))] = FileRecord(file_digest(path), path.stat().st_size)
        _sync(path)
    complete = msgspec.structs.replace(manifest, files=records)
    target = build_dir / MANIFEST_NAME
    write_json(target, complete)
    for name in records:  # safetensors makes its files private; all of an artifact's are as readable as the manifest
        (build_dir / name).chmod(stat.S_IMODE(target.stat().st_mode))
    _sync(target)
    shutil.rmtree(build_dir / WORK_FOLDER, ignore_errors=True)
    if folder.exists():
        retired = build_dir.with_name(f"{build_dir.name}.retired")
        folder.rename(retired)
        build_dir.rename(folder)
        shutil.rmtree(retired)
    else:
        build_dir.rename(folder)
    _sync(folder.parent)


def _files(build_dir: Path) -> list[Path]:
    """All files of a build folder but its resume data."""
    work = build_dir / WORK_FOLDER
    return sorted(path for path in build_dir.rglob("*") if path.is_file() and work not in path.parents)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_manifest(folder: Path) -> Manifest:
    """The manifest of an artifact, without checking its files.

    Raises:
        ArtifactError: there is none, or it cannot be read.
    """
    path = folder / MANIFEST_NAME
    if not path.is_file():
        hint = _rebuild_hint(folder) if folder.exists() else _build_hint(folder)
        raise ArtifactError(f"{folder} holds no artifact (no {MANIFEST_NAME})", hint)
    try:
        return msgspec.json.decode(path.read_bytes(), type=Manifest)
    except msgspec.DecodeError as error:
        raise ArtifactError(f"{path} cannot be read: {error}", _rebuild_hint(folder)) from error


def verify(folder: Path) -> Manifest:
    """The manifest of an artifact whose every file has the recorded size and sha256.

    Raises:
        ArtifactError: names the first file that is missing or altered.
        StrayFileError: names the first file that was added.
    """
    manifest = read_manifest(folder)
    require_no_strays(folder, manifest)
    for name in manifest.files:
        verify_file(folder, name, manifest)
    return manifest


def verify_file(folder: Path, name: str, manifest: Manifest) -> None:
    """Check one file of an artifact against its manifest.

    Raises:
        ArtifactError: it is missing or altered.
        StrayFileError: the manifest does not name it.
    """
    path, record = folder / name, manifest.files.get(name)
    if record is None:
        raise StrayFileError(f"{path} is not in the manifest", STRAY_HINT)
    if not path.is_file():
        raise ArtifactError(f"{path} is missing", _rebuild_hint(folder))
    if path.stat().st_size != record.size_bytes or file_digest(path) != record.sha256:
        raise ArtifactError(f"{path} is not the file that was built (size or sha256 differs)", _rebuild_hint(folder))


def require_no_strays(folder: Path, manifest: Manifest) -> None:
    """Check that the manifest lists every file in the folder; files of desktops and file systems are ignored.

    Raises:
        StrayFileError: names the first file that the manifest does not.
    """
    present = {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file() and not _is_debris(p.name)}
    if unknown := sorted(present - {MANIFEST_NAME, *manifest.files}):
        raise StrayFileError(f"{folder / unknown[0]} is not in the manifest", STRAY_HINT)


def _is_debris(name: str) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in DEBRIS)


def _build_hint(folder: Path) -> str:
    """The next step where an artifact is missing; names the targets that the same stage was built for, if any."""
    stage, _, target = folder.name.partition("@")
    built = sorted(path.parent.name.partition("@")[2] for path in folder.parent.glob(f"{stage}@*/{MANIFEST_NAME}"))
    others = f"; or give --target: {', '.join(built)} is built" if target and built else ""
    return f"build it: hyco-export {stage}{others}"


def _rebuild_hint(folder: Path) -> str:
    return f"build it again: hyco-export {folder.name.split('@')[0]}"


class Receipt(msgspec.Struct, frozen=True):
    """One finished unit of work: its files by path in the build folder, and a JSON note of whoever made it."""

    files: dict[str, FileRecord]
    note: Any = None


class PartialBuild:
    """The finished units of a build folder, for resuming. Several processes may use it for different units.

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
        # named by process: one that outlived its launch may still be writing its own
        draft = self._work / f"{label}.{os.getpid()}.draft"
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
        """The receipt of a unit whose files are whole; None without a receipt, or where a file differs from it."""
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
