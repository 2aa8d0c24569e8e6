"""Files as every room uses them: errors of the operating system, JSON, folder locks, shipped files, safetensors.

`storage_error` turns an OSError, or the text of one from a library written in Rust (safetensors, tokenizers), into a
`StorageError` with a next step. `TensorWriter` writes one safetensors file piece by piece, where the library's own
`save_file` needs every tensor in memory at once.
"""

import errno
import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, NamedTuple, Self

import msgspec
import numpy as np

from hyco_export.errors import ArtifactError, HycoError, RecipeError, StorageError

RUST_CODE = re.compile(r"\(os error (\d+)\)")  # the end of std::io::Error's text
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
CLOSED = (errno.EROFS, errno.EACCES, errno.EPERM)
LOCK_NAME = ".lock"
PACKAGE = Path(__file__).resolve().parent.parent
CHECKPOINTS = PACKAGE / "dev" / "tiny" / "checkpoints"
EMBEDDED_PREFIX = "embedded:"
TYPE_NAMES = {"float32": "F32", "int32": "I32", "int8": "I8", "uint8": "U8"}  # in the order in which safetensors sorts
HEADER_ALIGNMENT = 8  # of a safetensors file: tensor data start at a multiple


def storage_error(error: BaseException, place: Path | None = None) -> StorageError | None:
    """The StorageError for an error of the operating system; None for any other error, and for a HycoError.

    Args:
        place: what was worked on; named where `error` names no file.
    """
    code = None if isinstance(error, HycoError) else _code(error)
    if code is None and not isinstance(error, OSError):
        return None
    named = getattr(error, "filename", None) or place
    where = "" if named is None else f"{_text(named)}: "
    if code is None:
        return StorageError(f"{where}{' '.join(str(error).split()) or type(error).__name__}", _hint(code))
    return StorageError(f"{where}{os.strerror(code)}", _hint(code))


@contextmanager
def storage_errors(place: Path) -> Iterator[None]:
    """Turn errors of the operating system in the block into StorageErrors about `place`.

    Raises:
        StorageError: the operating system refused a file operation.
    """
    try:
        yield
    except Exception as error:
        found = storage_error(error, place)
        if found is None:
            raise
        raise found from error


def _code(error: BaseException) -> int | None:
    if isinstance(error, OSError):
        return error.errno
    match = RUST_CODE.search(str(error))
    return int(match.group(1)) if match else None


def _text(named: object) -> str:
    return named.decode(errors="replace") if isinstance(named, bytes) else str(named)


def _hint(code: int | None) -> str:
    if code in FULL:
        return "make room or raise the limit, then run the command again"
    if code in CLOSED:
        return "give a place that can be written, or change its permissions"
    return "correct the path or the disk, then run the command again"


def pretty_json(value: Any) -> bytes:
    """Indented JSON, fields in their declared order."""
    return msgspec.json.format(msgspec.json.encode(value), indent=2)


def write_json(path: Path, value: Any) -> None:
    """Write `value` as indented JSON."""
    path.write_bytes(pretty_json(value))


@contextmanager
def folder_lock(folder: Path, what: str, work: str, flag: str) -> Iterator[None]:
    """Lock a folder for this process; it is made when it is missing. The lock ends with the process.

    Args:
        folder: the folder to hold.
        what: the folder's role, for error messages, as are the next two.
        work: what is done in it.
        flag: the option that names another folder.

    Raises:
        ArtifactError: another process holds it.
        StorageError: it cannot be made or written.
    """
    import filelock  # no device locks a folder, and filelock is no part of what a phone installs

    # without the fallback: a soft lock would outlive a killed process
    lock = filelock.FileLock(folder / LOCK_NAME, timeout=0, fallback_to_soft=False)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except filelock.Timeout as error:
        raise ArtifactError(f"another process is {work} in {folder}", f"wait for it, or give {flag}") from error
    except OSError as error:
        reason = f"{error.strerror}: {error.filename}" if str(error.filename) != str(folder) else error.strerror
        message = f"{what} {folder} cannot be made or written: {reason}"
        raise StorageError(message, f"make room there, or give another folder with {flag}") from error
    try:
        yield
    finally:
        lock.release()


def resource_path(relative: str) -> Path:
    """A shipped file, e.g. `recipes/tiny.yaml`.

    Raises:
        RecipeError: it is neither in the package nor beside it.
    """
    for root in (PACKAGE, PACKAGE.parent):
        if (root / relative).exists():
            return root / relative
    raise RecipeError(f"{relative} is not part of this installation", "reinstall hyco-export")


def locate(reference: str, recipe_folder: Path | None) -> Path | None:
    """The local path a recipe's reference means, or None when it names nothing local (a Hub id).

    `embedded:NAME` is inside the package; else an absolute path or one from `~`, a path beside the recipe, or a shipped
    file.

    Raises:
        RecipeError: `embedded:` with a path that leaves the embedded family's folder.
    """
    if reference.startswith("~"):
        return Path(reference).expanduser()
    if reference.startswith(EMBEDDED_PREFIX):
        found = (CHECKPOINTS / reference.removeprefix(EMBEDDED_PREFIX)).resolve()
        if not found.is_relative_to(CHECKPOINTS):
            raise RecipeError(
                f"{reference!r} leaves the embedded family", "name one of its files, or give a path without `embedded:`"
            )
        return found
    roots = [Path()] if recipe_folder is None else [recipe_folder, Path()]
    for root in (*roots, PACKAGE, PACKAGE.parent):
        if (root / reference).exists():
            return root / reference
    return None


class Declared(NamedTuple):
    """Type (numpy's name) and shape of a tensor that will be written."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * np.dtype(self.dtype).itemsize


def close_on_disk(file: BinaryIO) -> None:
    """Close a file that was written, once its bytes are on the disk."""
    file.flush()
    os.fsync(file.fileno())
    file.close()


class TensorWriter:
    """A safetensors file under construction; a context manager.

    Args:
        path: the file to make.
        declared: every tensor by name.
        metadata: at most one key: safetensors writes several in no fixed order.

    Raises:
        ValueError: at the end of the block, a tensor was not written whole.
    """

    def __init__(self, path: Path, declared: Mapping[str, Declared], metadata: Mapping[str, str]) -> None:
        ranks = list(TYPE_NAMES)
        self._declared = dict(sorted(declared.items(), key=lambda item: (ranks.index(item[1].dtype), item[0])))
        header, self._offsets = _header(self._declared, metadata)
        self._missing = {name: tensor.size_bytes for name, tensor in self._declared.items()}
        self._file = path.open("wb")
        self._file.write(header)

    def put(self, name: str, values: np.ndarray, first_row: int = 0) -> None:
        """Write the rows of `values` as rows `first_row`... of a tensor, or a whole tensor.

        Raises:
            ValueError: another type or another shape than declared.
        """
        wanted = self._declared[name]
        whole = first_row == 0 and values.shape == wanted.shape
        if values.dtype.name != wanted.dtype or not (whole or values.shape[1:] == wanted.shape[1:]):
            raise ValueError(f"{name} is {values.dtype} {values.shape}, declared as {wanted}")
        row_bytes = 0 if whole else wanted.size_bytes // wanted.shape[0]
        self._file.seek(self._offsets[name] + first_row * row_bytes)
        self._file.write(np.ascontiguousarray(values).data)
        self._missing[name] -= values.nbytes

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        close_on_disk(self._file)
        unfinished = [name for name, count in self._missing.items() if count]
        if kind is None and unfinished:
            raise ValueError(f"{len(unfinished)} tensors were not written whole, first {unfinished[0]}")


def _header(declared: Mapping[str, Declared], metadata: Mapping[str, str]) -> tuple[bytes, dict[str, int]]:
    """The file's header, and the offset of each tensor's bytes in the file."""
    described: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    starts, position = {}, 0
    for name, tensor in declared.items():
        end = position + tensor.size_bytes
        starts[name] = position
        described[name] = {
            "dtype": TYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [position, end],
        }
        position = end
    text = json.dumps(described, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % HEADER_ALIGNMENT)
    data = HEADER_ALIGNMENT + len(text)
    return len(text).to_bytes(8, "little") + text, {name: data + start for name, start in starts.items()}
