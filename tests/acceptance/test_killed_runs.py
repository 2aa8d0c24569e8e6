"""`run` killed with SIGKILL at random moments: no half-written artifact is left or used, and the next run completes.

HYCO_KILLS sets how many kills (default 2); the moments are drawn over the length of a whole run.
"""

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from hyco_export.core.artifact import MANIFEST_NAME, verify
from hyco_export.core.files import resource_path
from hyco_export.core.recipe_loading import embedded_recipe

KILLS = int(os.environ.get("HYCO_KILLS", "2"))
ARTIFACTS = 6
PROMPTS = 12  # of 60: enough for every stage's samples
RUN_TIMEOUT_S = 1800  # a hang would last for ever

pytestmark = [pytest.mark.slow, pytest.mark.timeout((1 + 2 * KILLS) * RUN_TIMEOUT_S)]


def few_prompts(name: str, folder: Path) -> str:
    """A file of the first prompts of a shipped set."""
    lines = resource_path(name).read_text().splitlines()[:PROMPTS]
    path = folder / Path(name).name
    path.write_text("\n".join(lines))
    return str(path)


def short_recipe(folder: Path) -> Path:
    """The embedded recipe with little work in every stage: the order of events is what counts here."""
    content = yaml.safe_load(embedded_recipe().read_text())
    content["name"] = "short"
    for part in ("calibration", "validation"):
        content["data"][part] = few_prompts(content["data"][part], folder)
    content["capture"] |= {"max_new_tokens": 8, "validation_max_new_tokens": 8, "sampled_answers": 0}
    content["qat"] |= {"steps": 2, "warmup_steps": 1}
    content["validation"] |= {"prompts": 2, "emulator_prompts": 1, "max_new_tokens": 8, "emulator_max_new_tokens": 4}
    content["validation"]["gates"] |= {"min_mat": {}, "min_head_agreement": 0.5, "min_slm_agreement": 0.5}
    path = folder / "short.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def start(recipe: Path, run: Path) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "hyco_export", "run", str(recipe), "--run", str(run)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def complete(recipe: Path, run: Path) -> float:
    """Run to the end; the seconds it took."""
    began = time.monotonic()
    process = start(recipe, run)
    output, _ = process.communicate(timeout=RUN_TIMEOUT_S)
    assert process.returncode == 0, output
    return time.monotonic() - began


def artifacts(run: Path) -> list[Path]:
    """Folders that claim to be whole; each is checked."""
    found = sorted(path.parent for path in run.glob(f"*/{MANIFEST_NAME}"))
    for folder in found:
        verify(folder)
    return found


def test_every_run_after_a_kill_completes(tmp_path: Path) -> None:
    recipe, run = short_recipe(tmp_path), tmp_path / "run"
    whole_s = complete(recipe, run)
    assert len(artifacts(run)) == ARTIFACTS
    moments = random.Random(20261011)
    for _ in range(KILLS):
        shutil.rmtree(run)
        process = start(recipe, run)
        time.sleep(moments.uniform(0.0, whole_s))
        process.send_signal(signal.SIGKILL)
        process.communicate()
        artifacts(run)
        complete(recipe, run)
        assert len(artifacts(run)) == ARTIFACTS
