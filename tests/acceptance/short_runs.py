"""Short runs of the embedded family in processes of their own: recipes with little work, and how they are started."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import yaml

from hyco_export.core.artifact import Manifest, verify
from hyco_export.core.files import resource_path
from hyco_export.core.recipe_loading import embedded_recipe
from tests.support.interrupts import listen_to_interrupts

RUN_TIMEOUT_S = 900
LAUNCH = ("accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1")
LAUNCH_DEFAULTS = ("--mixed_precision", "no", "--dynamo_backend", "no", "-m", "hyco_export")


def short_recipe(folder: Path, prompts: int, **sections: dict[str, Any]) -> Path:
    """The embedded recipe on its first calibration and validation prompts; `sections` replaces fields of a section."""
    content = yaml.safe_load(embedded_recipe().read_text())
    content["name"] = "short"
    for split in ("calibration", "validation"):
        lines = resource_path(content["data"][split]).read_text().splitlines()[:prompts]
        (folder / f"{split}.jsonl").write_text("\n".join(lines) + "\n")
        content["data"][split] = f"{split}.jsonl"
    content["validation"] |= {"prompts": prompts, "emulator_prompts": 1}
    for section, fields in sections.items():
        content[section] |= fields
    path = folder / "short.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def start(command: str, recipe: Path, run: Path, processes: int = 1) -> "subprocess.Popen[str]":
    """`hyco-export COMMAND`, by `accelerate launch` for more than one process; stdout and stderr in one stream."""
    modules = ("hyco_export",) if processes == 1 else (*LAUNCH, *LAUNCH_DEFAULTS)
    arguments = [sys.executable, "-m", *modules, command, "--recipe", str(recipe), "--run", str(run)]
    return subprocess.Popen(
        arguments,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env=os.environ,
        preexec_fn=listen_to_interrupts,
    )


def complete(command: str, recipe: Path, run: Path, processes: int = 1) -> str:
    """Run to the end; what was printed."""
    process = start(command, recipe, run, processes)
    output, _ = process.communicate(timeout=RUN_TIMEOUT_S)
    assert process.returncode == 0, output
    return output


def whole(run: Path, stage: str) -> Manifest:
    """The manifest of an artifact, its files checked."""
    return verify(run / stage)


def decode_lines(path: Path) -> list[Any]:
    """The values of a JSONL file."""
    return [msgspec.json.decode(line) for line in path.read_bytes().splitlines()]
