"""One process at a time works in a folder; the system forgets the lock when that process ends, however it ends."""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hyco_export.errors import ArtifactError, StorageError

LOCK_NAME = ".lock"


@contextmanager
def folder_lock(folder: Path, what: str, work: str, flag: str) -> Iterator[None]:
    """Hold the folder; it is made when it is missing.

    Args:
        what: the folder's role, `work`: what is done in it, `flag`: the option that names another; for the errors.

    Raises:
        ArtifactError: another process holds it.
        StorageError: it cannot be made or written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        stream = (folder / LOCK_NAME).open("w")
    except OSError as error:
        reason = f"{error.strerror}: {error.filename}" if str(error.filename) != str(folder) else error.strerror
        message = f"{what} {folder} cannot be made or written: {reason}"
        raise StorageError(message, f"make room there, or give another folder with {flag}") from error
    with stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ArtifactError(f"another process is {work} in {folder}", f"wait for it, or give {flag}") from error
        yield
