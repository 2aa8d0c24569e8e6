"""What a phone runs needs no framework: a generation in a process that can import none, against a live server."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hyco_export.core.artifact import COMPILE
from hyco_export.device.drafters import NullDrafter
from hyco_export.device.driver import generate
from hyco_export.device.interfaces import Request
from hyco_export.protocol import wire
from hyco_export.protocol.tree import Source
from hyco_export.server.engine import LocalTransport
from hyco_export.server.http import create_app
from hyco_export.stages.table import STAGES
from tests.device.generate_without_frameworks import BLOCKED
from tests.evaluate.diagnosis.small_run import SmallRun, build_small_run
from tests.support.live_server import running

SCRIPT = Path(__file__).parent / "generate_without_frameworks.py"
NEW_TOKENS = 24
PROMPT = (5, 9, 14, 20, 31, 7)
ROOMS = ("hyco_export.core", "hyco_export.device", "hyco_export.protocol", "hyco_export.errors")
SESSION_OF_THE_BACK_END = ("hyco_export", "hyco_export.graph", "hyco_export.graph.parity")  # ONNX Runtime's


@pytest.fixture(scope="module")
def run_without_binaries(tmp_path_factory: pytest.TempPathFactory) -> SmallRun:
    torch.set_num_threads(1)
    stages = [stage for stage in STAGES if stage.name != COMPILE]
    return build_small_run(tmp_path_factory.mktemp("frameworks"), stages)


def test_a_whole_generation_needs_no_framework(run_without_binaries: SmallRun) -> None:
    engine, info = run_without_binaries.serve()
    greedy = Request("plain", "p", wire.Sampling(0.0, 0, 1.0), wire.EXACT, 1, NEW_TOKENS)
    expected = generate(PROMPT, greedy, NullDrafter(), LocalTransport(engine, info)).tokens
    with running(create_app(engine, info)) as url:
        arguments = [str(run_without_binaries.root), url, ",".join(map(str, PROMPT)), str(NEW_TOKENS)]
        ended = subprocess.run([sys.executable, SCRIPT, *arguments], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    assert tuple(found["tokens"]) == expected and len(expected) > 1
    assert {Source.CHAIN, Source.SLM} <= {source for one in found["rounds"] for source in one["sources"]}
    assert not {name.split(".")[0] for name in found["modules"]} & set(BLOCKED)
    ours = [name for name in found["modules"] if name.split(".")[0] == "hyco_export"]
    assert [name for name in ours if not name.startswith(ROOMS) and name not in SESSION_OF_THE_BACK_END] == []
    assert "hyco_export.device.driver" in ours


def test_the_hook_blocks() -> None:
    code = f"import sys; sys.path.insert(0, {str(SCRIPT.parent)!r}); import generate_without_frameworks as one"
    code += "; sys.meta_path.insert(0, one.Blocker()); import torch"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1 and "torch is blocked on the device" in ended.stderr
