"""`evaluate` on a small run in processes of its own: killed with SIGKILL and resumed, it ends with the same rows."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from hyco_export.evaluate.quality.evaluation_folder import ANSWERS
from tests.evaluate.diagnosis.small_run import build_small_run, open_small_run
from tests.support.shared import built_once

TIMES = ("server_ms", "draft_ms", "wall_ms", "first_token_ms")
TIMEOUT_S = 300
TALKS = (
    {"id": "two", "messages": [("user", "A list?"), ("assistant", "not ours"), ("user", "And a set?")]},
    {"id": "one", "messages": [("user", "Say it again.")]},
    {"id": "long", "messages": [("user", "a list keeps order and " * 8000)]},
    {"id": "last", "messages": [("user", "What do brackets do?")]},
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(4 * TIMEOUT_S)]


@pytest.fixture
def arguments(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    run = open_small_run(built_once(tmp_path_factory, "small-run", build_small_run))
    recipe = tmp_path / "small.yaml"
    recipe.write_text(yaml.safe_dump(msgspec.to_builtins(run.recipe)))
    talks = tmp_path / "talks.jsonl"
    rows = [
        {"id": talk["id"], "messages": [{"role": role, "content": text} for role, text in talk["messages"]]}
        for talk in TALKS
    ]
    talks.write_text("\n".join(map(json.dumps, rows)))
    command = [sys.executable, "-m", "hyco_export", "evaluate", "--recipe", str(recipe), "--run", str(run.root)]
    return [*command, "--prompts", str(talks), "--max-new-tokens", "12", "--generations", "2"]


def start(arguments: list[str], out: Path) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [*arguments, "--out", str(out)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def complete(arguments: list[str], out: Path) -> str:
    process = start(arguments, out)
    said, _ = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0, said
    return said


def rows(folder: Path) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (folder / ANSWERS).read_bytes().splitlines()]
    return [{name: value for name, value in row.items() if name not in TIMES} for row in found]


def test_a_killed_evaluation_goes_on_to_the_same_rows(arguments: list[str], tmp_path: Path) -> None:
    said = complete(arguments, tmp_path / "whole")
    assert "coverage: hyco 8 of 10" in said and "failed: 6 answers: prompt long has" in said
    killed = tmp_path / "killed"
    process = start(arguments, killed)
    deadline = time.monotonic() + TIMEOUT_S
    while not (killed / ANSWERS).exists() or len((killed / ANSWERS).read_bytes().splitlines()) < 6:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    complete(arguments, killed)
    whole = rows(tmp_path / "whole")
    assert rows(killed) == whole and len(whole) == 3 * 5 * 2
    summary = json.loads((killed / "summary.json").read_bytes())
    assert summary["coverage"] == {system: [8, 10] for system in ("cloud-mtp", "hyco-exact", "hyco")}
    assert [system["system"] for system in summary["systems"]] == ["cloud-mtp", "hyco-exact", "hyco"]
    logged = str(killed / "hyco.jsonl")
    replayed = subprocess.run([*arguments[:3], "replay", logged], capture_output=True, text=True, timeout=TIMEOUT_S)
    assert replayed.returncode == 0, replayed.stderr
