"""One small run for all tests: building it takes the compiler."""

import pytest
import torch

from hyco_export.protocol.wire import ServerInfo
from hyco_export.server.engine import Engine
from tests.evaluate.diagnosis.small_run import SmallRun, build_small_run, open_small_run
from tests.support.shared import built_once


@pytest.fixture(scope="session")
def small_run(tmp_path_factory: pytest.TempPathFactory) -> SmallRun:
    torch.set_num_threads(1)
    return open_small_run(built_once(tmp_path_factory, "small-run", build_small_run))


@pytest.fixture
def served(small_run: SmallRun) -> tuple[Engine, ServerInfo]:
    """A server of its own for every test: faults are planted in it."""
    return small_run.serve()
