"""The stage table: every place that it names exists, and a command loads little before its work begins."""

import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hyco_export.core.deferred import Deferred
from hyco_export.stages.declarations import Stage
from hyco_export.stages.table import SLM_STAGES, STAGES

MOST_MODULES = 45  # of our own, packages included
LOADED = """
import sys
from hyco_export.cli import build, main
def stop(*_):
    print("loaded:", *sorted(name for name in sys.modules if name.partition(".")[0] == "hyco_export"))
    raise SystemExit(7)
build.build_all = build.show_plan = stop
main()
"""


@pytest.mark.parametrize("stage", [*STAGES, SLM_STAGES[0]], ids=lambda stage: stage.name)
def test_a_row_names_functions_that_exist(stage: Stage) -> None:
    assert isinstance(stage.build, Deferred) and isinstance(stage.estimate, Deferred)
    for function, parameters in ((stage.build, 4), (stage.check, 2), (stage.estimate, 3)):
        found = function.find() if isinstance(function, Deferred) else function
        asked = inspect.signature(found).parameters.values()
        assert sum(parameter.default is parameter.empty for parameter in asked) == parameters


@pytest.mark.parametrize("last", [(), ("--dry-run",)], ids=["build", "dry run"])
@pytest.mark.parametrize("name", ["capture", "compile"])
def test_a_stage_command_loads_little_before_its_work_begins(name: str, last: tuple[str, ...], tmp_path: Path) -> None:
    command = [sys.executable, "-c", LOADED, name, "--run", str(tmp_path / "run"), *last]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 7, done
    loaded = done.stdout.splitlines()[-1].split()[1:]
    assert "hyco_export.stages.table" in loaded
    assert len(loaded) <= MOST_MODULES, loaded
    assert not {f"hyco_export.stages.{stage}" for stage in ("capture", "qat_head", "compile")} & set(loaded)
