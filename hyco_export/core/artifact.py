"""Artifacts: a folder whose `manifest.json` was written last, with the sha256 of every other file in it.

Knows publishing (temporary folder, hashes, manifest, rename) and reading back; not which stages there are. A folder
without a manifest does not exist.
"""

import hashlib
import os
import shutil
import stat
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import msgspec

from hyco_export.core.json_file import write_json
from hyco_export.errors import ArtifactError, StrayFileError

MANIFEST_NAME = "manifest.json"
WORK_FOLDER = ".work"  # inside a build folder: what a stage keeps to go on after a kill; no part of the artifact
CHUNK_BYTES = 1 << 20
DEBRIS = (".DS_Store", "._*", "Thumbs.db", "desktop.ini", ".directory", ".nfs*", ".fuse_hidden*")
STRAY_HINT = "move or remove it: the artifact is built anew only where one of its own files is damaged"


class FileRecord(msgspec.Struct, frozen=True):
    """What one file must be."""

    sha256: str
    size_bytes: int


class Manifest(msgspec.Struct, frozen=True):
    """What an artifact was made from (`key` sums it up), what is in it, and what was measured while making it."""

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

    @property
    def size_bytes(self) -> int:
        """Of all files but the manifest."""
        return sum(record.size_bytes for record in self.files.values())


def file_digest(path: Path) -> str:
    """sha256 of a file's content, hex."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while chunk := stream.read(CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def content_digest(content: Any) -> str:
    """sha256 of plain values, hex; the order of a mapping's names does not matter."""
    return hashlib.sha256(msgspec.json.encode(content, order="sorted")).hexdigest()


def artifact_key(
    stage: str, revision: int, config: msgspec.Struct, inputs: Mapping[str, str], sources: Mapping[str, str]
) -> str:
    """The identity of an artifact: equal keys mean equal bytes."""
    return content_digest([stage, revision, msgspec.to_builtins(config), dict(inputs), dict(sources)])


def publish(build_dir: Path, folder: Path, manifest: Manifest) -> None:
    """Hash the files of `build_dir`, write its manifest, and let it take the place of `folder`.

    A kill at any moment leaves the old artifact, no artifact, or the new one; never a half-written one. What a stage
    keeps to go on is removed once nothing more is written: a disk that has no room for the manifest costs no work.
    """
    (build_dir / MANIFEST_NAME).unlink(missing_ok=True)  # of a publishing that was killed before the rename
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
    """All files of an artifact that is complete but for its manifest."""
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
        raise ArtifactError(f"{folder} holds no artifact (no {MANIFEST_NAME})", _rebuild_hint(folder))
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
    """Compare one file of an artifact with its manifest.

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
    """Compare names alone. What file systems and desktops leave everywhere is no one's file, and passed over.

    Raises:
        StrayFileError: names the first file that the manifest does not.
    """
    present = {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file() and not _is_debris(p.name)}
    if unknown := sorted(present - {MANIFEST_NAME, *manifest.files}):
        raise StrayFileError(f"{folder / unknown[0]} is not in the manifest", STRAY_HINT)


def _is_debris(name: str) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in DEBRIS)


def _rebuild_hint(folder: Path) -> str:
    return f"build it again: hyco-export {folder.name.split('@')[0]}"
