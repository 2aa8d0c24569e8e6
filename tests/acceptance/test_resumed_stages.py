"""Stages stopped in the middle, by SIGKILL and Ctrl-C, go on inside the stage and end with the same bytes."""

import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hyco_export.core.artifact import RECEIPT_SUFFIX, WORK_FOLDER
from hyco_export.stages.qat_head import CHECKPOINT_STEPS
from hyco_export.stages.runner import BUILD_FOLDER
from tests.acceptance.short_runs import RUN_TIMEOUT_S, complete, short_recipe, start, whole

pytestmark = pytest.mark.slow

PROMPTS = 6  # of each split
WORK = {
    "capture": {"max_new_tokens": 24, "validation_max_new_tokens": 8, "sampled_answers": 1},
    "qat": {"steps": 2 * CHECKPOINT_STEPS + 5, "warmup_steps": 5, "accumulation": 2},
}
POLL_S = 0.02


def receipts(run: Path, pattern: str) -> int:
    """Finished units of the builds in a run folder."""
    return len(list(run.glob(f"{BUILD_FOLDER}/*/{WORK_FOLDER}/{pattern}{RECEIPT_SUFFIX}")))


def stop_when(
    reached: Callable[[], bool], with_signal: signal.Signals, recipe: Path, run: Path, command: str = "qat-head"
) -> str:
    """Start a command and stop it at a moment; what it printed."""
    process = start(command, recipe, run)
    deadline = time.monotonic() + RUN_TIMEOUT_S
    while not reached():
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()[0]
        time.sleep(POLL_S)
    process.send_signal(with_signal)
    output, _ = process.communicate(timeout=RUN_TIMEOUT_S)
    assert process.returncode != 0
    return output


def test_stopped_stages_go_on_from_what_is_done(tmp_path: Path) -> None:
    recipe, run = short_recipe(tmp_path, PROMPTS, **WORK), tmp_path / "run"
    complete("qat-head", recipe, tmp_path / "whole")

    stop_when(lambda: receipts(run, "calibration-*") >= 3, signal.SIGKILL, recipe, run)
    finished = receipts(run, "calibration-*") + receipts(run, "validation-*")
    assert 3 <= finished < 2 * PROMPTS
    output = stop_when(lambda: receipts(run, "training") > 0, signal.SIGINT, recipe, run)
    assert f"going on: {finished} of {2 * PROMPTS} prompts are done" in output
    assert f"kept: capture, what is done of qat-head in {run}; the same command goes on from there" in output
    output = complete("qat-head", recipe, run)
    steps = re.search(r"going on: (\d+) of \d+ training steps are done", output)
    assert steps is not None and int(steps[1]) >= CHECKPOINT_STEPS

    for stage in ("capture", "qat-head"):
        assert whole(run, stage).files == whole(tmp_path / "whole", stage).files
    assert not (run / BUILD_FOLDER).exists()


def test_a_killed_conversion_goes_on_from_what_is_calibrated(tmp_path: Path) -> None:
    recipe, run = short_recipe(tmp_path, PROMPTS, **WORK), tmp_path / "run"
    complete("convert-slm", recipe, tmp_path / "whole")

    output = stop_when(lambda: receipts(run, "calibration") > 0, signal.SIGKILL, recipe, run, "convert-slm")
    assert "[3/3] convert-slm: " in output
    assert receipts(run, "surgery") == 1
    output = complete("convert-slm", recipe, run)
    sequences = re.search(r"going on: (\d+) of (\d+) calibration sequences are done", output)
    assert sequences is not None and 1 <= int(sequences[1]) <= int(sequences[2])
    assert "build-keepset: fresh" in output

    assert whole(run, "convert-slm").files == whole(tmp_path / "whole", "convert-slm").files
    assert not (run / BUILD_FOLDER).exists()
