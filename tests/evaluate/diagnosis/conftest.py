"""One small run for all tests of a process: building it takes the compiler."""

import pytest
import torch

from hyco_export.protocol.wire import ServerInfo
from hyco_export.server.engine import Engine
from tests.evaluate.diagnosis.small_run import SmallRun, build_small_run


@pytest.fixture(scope="session")
def small_run(tmp_path_factory: pytest.TempPathFactory) -> SmallRun:
    torch.set_num_threads(1)
    return build_small_run(tmp_path_factory.mktemp("small"))


@pytest.fixture
def served(small_run: SmallRun) -> tuple[Engine, ServerInfo]:
    """A server of its own for every test: faults are planted in it."""
    return small_run.serve()
