"""Folders that are dear to build and only read: built once for all worker processes of a test run."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from filelock import FileLock

WORKER = "PYTEST_XDIST_WORKER"  # set in worker processes, whose temporary folders lie side by side


def built_once(factory: pytest.TempPathFactory, name: str, build: Callable[[Path], object]) -> Path:
    """The folder `name` as `build` left it; who comes second waits for the first, or builds what it could not."""
    own = factory.getbasetemp()
    place = (own.parent if WORKER in os.environ else own) / "shared"
    place.mkdir(exist_ok=True)
    folder, done = place / name, place / f"{name}.done"
    with FileLock(place / f"{name}.lock"):
        if not done.exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            build(folder)
            done.touch()
    return folder
