"""One small run for all tests of a process: building it takes the compiler."""

import pytest
import torch
from small_run import SmallRun, build_small_run

from hyco_export.runtime.engine import Engine
from hyco_export.runtime.wire import ServerInfo


@pytest.fixture(scope="session")
def small_run(tmp_path_factory: pytest.TempPathFactory) -> SmallRun:
    torch.set_num_threads(1)
    return build_small_run(tmp_path_factory.mktemp("small"))


@pytest.fixture
def served(small_run: SmallRun) -> tuple[Engine, ServerInfo]:
    """A server of its own for every test: faults are planted in it."""
    return small_run.serve()
