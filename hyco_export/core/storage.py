"""What a refusal by the operating system means to a user: a full disk, a read-only folder, a file that is not there.

Knows the system's codes, as OSError carries them and as libraries written in Rust (safetensors, tokenizers) write them
into their texts; not who wanted the file.
"""

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hyco_export.errors import HycoError, StorageError

RUST_CODE = re.compile(r"\(os error (\d+)\)")  # the end of std::io::Error's text
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
CLOSED = (errno.EROFS, errno.EACCES, errno.EPERM)


def storage_error(error: BaseException, place: Path | None = None) -> StorageError | None:
    """The error to show for a refusal by the operating system; None for another error, or one that says its next step.

    Args:
        place: what was worked on, said where `error` names no file.
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
def said_of(place: Path) -> Iterator[None]:
    """Work in `place`.

    Raises:
        StorageError: the operating system refused a file.
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
