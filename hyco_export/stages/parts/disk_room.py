"""A full disk under the vendor's compiler, which reports it as any other failure, called what it is."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import onnx

from hyco_export.core.files import FULL
from hyco_export.core.numerics import BYTES_PER_MB
from hyco_export.errors import CompileError, StorageError

BINARY_SHARE = 1.25  # of a graph's bytes: 1.02 to 1.04 at full size, 1.13 to 1.4 of the embedded family's ...
LEAST_BYTES = 64_000  # ... and of any: that of two layers has 53 kB


@contextmanager
def full_disk_named(out_dir: Path, *models: Path) -> Iterator[None]:
    """Compile graphs into a binary in `out_dir`.

    Raises:
        StorageError: the compiler failed, and there is no room for what it makes.
        CompileError: it failed otherwise.
    """
    try:
        yield
    except CompileError as error:
        needed = binary_bytes(*models)
        if fits(out_dir, needed):
            raise
        names = " and ".join(model.stem for model in models)
        room = f"about {_mb(needed)} are needed, {_mb(shutil.disk_usage(out_dir).free)} are free"
        raise StorageError(
            f"{out_dir}: No space left for the binary of {names}: {room} ({error.message})",
            "make room or raise the limit, then run the command again",
        ) from error


def binary_bytes(*models: Path) -> int:
    """About what a binary of these graphs takes."""
    return LEAST_BYTES + round(BINARY_SHARE * sum(map(graph_bytes, models)))


def graph_bytes(model: Path) -> int:
    """Bytes of a graph and of the files with its weights."""
    tensors = onnx.load(model, load_external_data=False).graph.initializer
    places = {entry.value for tensor in tensors for entry in tensor.external_data if entry.key == "location"}
    return sum(path.stat().st_size for path in (model, *(model.parent / place for place in places)))


def fits(folder: Path, size_bytes: int) -> bool:
    """Is there room for a file of that size in `folder`, by free space and quota?"""
    if not hasattr(os, "posix_fallocate"):
        return shutil.disk_usage(folder).free >= size_bytes
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            os.posix_fallocate(file.fileno(), 0, max(1, size_bytes))
    except OSError as error:
        return error.errno not in FULL and shutil.disk_usage(folder).free >= size_bytes
    return True


def _mb(size_bytes: int) -> str:
    return f"{size_bytes / BYTES_PER_MB:,.1f} MB"
