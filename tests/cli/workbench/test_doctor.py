"""`doctor` from the command line."""

import json
from pathlib import Path

import pytest

from hyco_export.cli.connection import ConnectOptions
from hyco_export.cli.workbench.doctor import run_doctor
from tests.support.fake_hub import TOKEN


def test_the_command_ends_with_1_when_something_is_blocked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_doctor(None, tmp_path / "run", None, ConnectOptions(), True) == 0
    checks = json.loads(capsys.readouterr().out)
    assert {check["group"] for check in checks} == {"machine", "run folder"}
    assert run_doctor(None, tmp_path / "run", "http://127.0.0.1:1", ConnectOptions(), False) == 1
    said = capsys.readouterr().out
    assert "BLOCKED" in said and "1 blocked" in said and TOKEN not in said
