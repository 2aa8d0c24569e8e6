"""What several tests of stages share."""

from pathlib import Path

import pytest


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "source.txt"
    path.write_text("x")
    return path
