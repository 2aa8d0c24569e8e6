"""`driver.pyz` in a process that can import nothing but what a device installs."""

import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from hyco_export.bundle.archive import write_driver
from hyco_export.device.drafters import NullDrafter
from hyco_export.device.driver import generate
from hyco_export.device.interfaces import Request
from hyco_export.models.text.tokenizer import encode_prompt
from hyco_export.protocol import wire
from hyco_export.server.engine import LocalTransport
from hyco_export.server.http import create_app
from tests.evaluate.diagnosis.small_run import SmallRun
from tests.support.live_server import running

BLOCKED = Path(__file__).with_name("blocked.py")
ALLOWED = "numpy,onnxruntime,msgspec,safetensors,tokenizers,hyco_export"
QUESTION = "Say it."
NEW_TOKENS = 24


def run_driver(bundle: Path, *arguments: object, allowed: str = ALLOWED) -> subprocess.CompletedProcess[str]:
    call = [bundle / "driver.pyz", "chat", "--bundle", bundle, *arguments]
    command = [sys.executable, "-P", BLOCKED, allowed, *call]
    return subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=300, cwd=bundle)


@pytest.fixture(scope="module")
def server(small_run: SmallRun) -> Iterator[tuple[str, str]]:
    """URL of a server of the small run, and its own greedy answer to the question."""
    engine, info = small_run.serve()
    ids = encode_prompt(small_run.tokenizer, [{"role": "user", "content": QUESTION}])
    greedy = Request("plain", "p", wire.Sampling(0.0, 0, 1.0), wire.EXACT, 1, NEW_TOKENS)
    tokens = generate(ids, greedy, NullDrafter(), LocalTransport(engine, info)).tokens
    with running(create_app(engine, info)) as url:
        yield url, small_run.tokenizer.decode(tokens, skip_special_tokens=True).strip()


@pytest.mark.parametrize("system", ["hyco-exact", "hyco-2p", "plain"])
def test_greedy_answers_are_the_servers_own(bundle_folder: Path, server: tuple[str, str], system: str) -> None:
    url, expected = server
    asked = ("--prompt", QUESTION, "--tokens", NEW_TOKENS, "--greedy", "--system", system)
    ended = run_driver(bundle_folder, "--server", url, *asked)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.rpartition("\n[")[0].strip() == expected and expected


def test_a_conversation_of_two_turns(bundle_folder: Path, server: tuple[str, str]) -> None:
    ended = run_driver(bundle_folder, "--server", server[0], "--prompt", QUESTION, "--prompt", "Again?", "--tokens", 8)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count(" rounds, ") == 2


@pytest.mark.slow
def test_the_context_binaries_draft_too(bundle_folder: Path, server: tuple[str, str]) -> None:
    url, expected = server
    asked = ("--prompt", QUESTION, "--tokens", NEW_TOKENS, "--greedy", "--system", "hyco-exact", "--backend", "qnn")
    ended = run_driver(bundle_folder, "--server", url, *asked, allowed=f"{ALLOWED},onnxruntime_qnn")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.rpartition("\n[")[0].strip().endswith(expected)


def test_a_server_of_another_run_is_refused(
    bundle_folder: Path, small_run: SmallRun, server: tuple[str, str], tmp_path: Path
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(bundle_folder, copy)
    text = (copy / "bundle.json").read_text()
    digest = next(line for line in text.splitlines() if '"head_digest"' in line)
    (copy / "bundle.json").write_text(text.replace(digest, '    "head_digest": "another",'))
    ended = run_driver(copy, "--server", server[0], "--prompt", QUESTION)
    assert ended.returncode == 2 and "head_digest is" in ended.stderr and "next: " in ended.stderr


def test_a_cut_off_file_is_noticed(bundle_folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(bundle_folder, copy)
    tables = copy / "tables" / "slm_tables.safetensors"
    tables.write_bytes(tables.read_bytes()[:-1])
    ended = run_driver(copy, "--server", "http://127.0.0.1:9", "--prompt", QUESTION)
    assert ended.returncode == 2 and "slm_tables.safetensors has" in ended.stderr


def test_golden_vectors_may_stay_behind(bundle_folder: Path, server: tuple[str, str], tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(bundle_folder, copy, ignore=shutil.ignore_patterns("golden", "qnn-net-run"))
    ended = run_driver(copy, "--server", server[0], "--prompt", QUESTION, "--tokens", 4)
    assert ended.returncode == 0, ended.stderr


def test_equal_sources_give_equal_bytes(tmp_path: Path) -> None:
    one, other = tmp_path / "one.pyz", tmp_path / "other.pyz"
    write_driver(one)
    write_driver(other)
    assert one.read_bytes() == other.read_bytes()
    names = zipfile.ZipFile(one).namelist()
    assert {"__main__.py", "hyco_export/device/driver.py", "hyco_export/protocol/wire.py"} <= set(names)
    assert not [name for name in names if name.split("/")[1:2] in (["models"], ["graph"], ["server"], ["cli"])]
