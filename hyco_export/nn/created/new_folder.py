"""A new folder that exists whole or not at all: it is written beside its place and renamed. Knows no checkpoints."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hyco_export.errors import CheckpointError

PARTIAL_SUFFIX = ".partial"


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """The folder to write into; it becomes `out` when the block ends well, and is removed when it does not.

    Raises:
        CheckpointError: `out` exists.
    """
    if out.exists():
        raise CheckpointError(f"{out} exists already", "give a new folder")
    partial = out.with_name(f".{out.name}{PARTIAL_SUFFIX}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
        partial.rename(out)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
