"""The consumer: its own code on every golden vector, and a conversation, with numpy and onnxruntime alone."""

import ast
import importlib.util
import io
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import ModuleType, SimpleNamespace

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hyco_export.bundle.folder import CONSUMER, PACKAGE
from hyco_export.bundle.spec import GRAPHS, open_bundle
from hyco_export.core.artifact import file_digest
from hyco_export.core.numerics import log_softmax
from hyco_export.device.drafters import NullDrafter
from hyco_export.device.driver import generate
from hyco_export.device.interfaces import Request
from hyco_export.device.tree_builder import best_columns
from hyco_export.protocol import wire
from hyco_export.server.engine import LocalTransport
from hyco_export.server.http import create_app
from tests.evaluate.diagnosis.small_run import SmallRun
from tests.support.live_server import running

SOURCE = PACKAGE / CONSUMER
BLOCKED = Path(__file__).with_name("blocked.py")
ALLOWED = "numpy,onnxruntime"
LINES, WIDTH = 300, 155  # all of it, words and blank lines too; no line that a screen cannot hold
NEW_TOKENS = 24
PROMPT = (5, 9, 14, 20, 31, 7)
Mistake = Callable[[ModuleType, pytest.MonkeyPatch], None]


def run_consumer(*arguments: object, allowed: str = ALLOWED) -> subprocess.CompletedProcess[str]:
    bundle = Path(str(arguments[0]))
    command = [sys.executable, "-P", BLOCKED, allowed, bundle / "consumer.py", *arguments]
    return subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=300, cwd=bundle)


def run_source(bundle: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", BLOCKED, ALLOWED, SOURCE, bundle]
    return subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=60)


def assert_refused(ended: subprocess.CompletedProcess[str], problem: str) -> None:
    """One line with what is wrong and what helps."""
    assert ended.returncode == 2 and not ended.stdout
    assert ended.stderr == f"{problem}: give a bundle's folder, or copy the bundle again\n"


@cache
def load_consumer() -> ModuleType:
    spec = importlib.util.spec_from_file_location("consumer", SOURCE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def server(small_run: SmallRun) -> Iterator[tuple[str, tuple[int, ...]]]:
    """URL of a server of the small run, and its own greedy text."""
    engine, info = small_run.serve()
    greedy = Request("plain", "p", wire.Sampling(0.0, 0, 1.0), wire.EXACT, 1, NEW_TOKENS)
    expected = generate(PROMPT, greedy, NullDrafter(), LocalTransport(engine, info)).tokens
    with running(create_app(engine, info)) as url:
        yield url, expected


def test_every_golden_passes_and_bit_for_bit(bundle_folder: Path) -> None:
    ended = run_consumer(bundle_folder)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    bundle = open_bundle(bundle_folder)
    lines = ended.stdout.splitlines()
    for name, graph in bundle.graphs.items():
        count = sum(case.graph == name for case in bundle.cases) * len(graph.outputs)
        assert f"{name}: {count} outputs, {count} equal, 0 outside the tolerance" in lines
    assert [line.split(":")[0] for line in lines if "all as recorded" in line] == [
        "session before",
        "session across",
        "session after",
        "session edges",
    ]


@pytest.mark.slow
def test_every_golden_passes_in_the_emulator(bundle_folder: Path) -> None:
    ended = run_consumer(bundle_folder, "--backend", "qnn", allowed=f"{ALLOWED},onnxruntime_qnn")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    lines = [line for line in ended.stdout.splitlines() if line.partition(":")[0] in GRAPHS]
    assert len(lines) == len(GRAPHS)
    for line in lines:
        outputs, equal = (part.split()[0] for part in line.split(":")[1].split(",")[:2])
        assert outputs == equal, "the emulator gives the same bits again"


def test_a_conversation_gives_the_servers_own_greedy_text(
    bundle_folder: Path, server: tuple[str, tuple[int, ...]], tmp_path: Path
) -> None:
    url, expected = server
    greedy = tmp_path / "greedy"
    shutil.copytree(bundle_folder, greedy)
    facts = json.loads((greedy / "bundle.json").read_bytes())
    facts["server"] |= {"sampling": [0.0, 0, 1.0], "acceptance": msgspec.to_builtins(wire.EXACT)}
    (greedy / "bundle.json").write_text(json.dumps(facts))
    ids = ",".join(map(str, PROMPT))
    ended = run_consumer(greedy, "--server", url, "--ids", ids, "--tokens", NEW_TOKENS)
    assert ended.returncode == 0, ended.stderr
    assert tuple(map(int, ended.stdout.split())) == expected and len(expected) > 1


def test_a_conversation_in_text(bundle_folder: Path, server: tuple[str, tuple[int, ...]]) -> None:
    turns = ("--prompt", "Say it.", "--prompt", "Again?")
    ended = run_consumer(bundle_folder, "--server", server[0], *turns, allowed=f"{ALLOWED},tokenizers")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("> ") == 2 and ended.stdout.count(" rounds]") == 2


def test_a_refusal_is_said(bundle_folder: Path, server: tuple[str, tuple[int, ...]]) -> None:
    ended = run_consumer(bundle_folder, "--server", server[0], "--ids", "99999999")
    assert ended.returncode == 1 and "the server refuses: token_range" in ended.stderr


def test_a_cut_off_file_is_noticed(bundle_folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(bundle_folder, copy)
    binary = copy / "slm_tree" / "slm_tree.bin"
    binary.write_bytes(binary.read_bytes()[:-4096])
    ended = run_consumer(copy)
    assert_refused(ended, f"{binary} is not the file that was built")
    binary.unlink()
    assert_refused(run_consumer(copy), f"{binary} cannot be read (No such file or directory)")


def test_no_bundle_is_said_in_a_line(tmp_path: Path) -> None:
    missing = run_source(tmp_path / "missing")
    assert_refused(missing, f"{tmp_path}/missing/bundle.json cannot be read (No such file or directory)")
    assert_refused(run_source(SOURCE), f"{SOURCE}/bundle.json cannot be read (Not a directory)")


@pytest.mark.parametrize(
    "content",
    [b"", b"[", b"\xff", b"[]", b"null", b"{}", b'{"files": {}}', b"[" * 100_000],
    ids=lambda text: str(text[:12]),
)
def test_a_damaged_list_of_files_is_said_in_a_line(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "bundle.json").write_bytes(content)
    assert_refused(run_source(tmp_path), f"{tmp_path}/bundle.json is not the file that was built")


def test_whatever_stands_in_the_list_of_files_ends_in_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    consumer = load_consumer()
    for files in (
        None,
        [],
        3,
        {"a": None},
        {"a": {}},
        {"a": {"sha256": 1}},
        {"\0": {"sha256": ""}},
        {"": {"sha256": ""}},
    ):
        (tmp_path / "a").write_bytes(b"")
        facts = dict.fromkeys(consumer.PARTS) | {"files": files}
        (tmp_path / "bundle.json").write_text(json.dumps(facts))
        with pytest.raises(SystemExit) as ended:
            consumer.open_bundle(tmp_path)
        said = capsys.readouterr().err
        assert ended.value.code == 2 and said.count("\n") == 1 and "copy the bundle again" in said


def without_stops(consumer: ModuleType, patch: pytest.MonkeyPatch) -> None:
    begin = consumer.Drafter.__init__

    def ignoring(drafter, *arguments):
        begin(drafter, *arguments)
        drafter.stops = set()

    patch.setattr(consumer.Drafter, "__init__", ignoring)


def of_equals_the_larger_column(consumer: ModuleType, patch: pytest.MonkeyPatch) -> None:
    right = consumer.best_children
    turned = lambda levels, *rest: [(len(levels) - 1 - column, q) for column, q in right(levels[::-1], *rest)]  # noqa: E731
    patch.setattr(consumer, "best_children", turned)


@pytest.mark.parametrize("mistake", [None, without_stops, of_equals_the_larger_column])
def test_mistakes_that_graphs_rarely_show_are_caught_by_the_altered_session(
    bundle_folder: Path, monkeypatch: pytest.MonkeyPatch, mistake: Mistake | None
) -> None:
    consumer, facts = load_consumer(), json.loads((bundle_folder / "bundle.json").read_bytes())
    sides = {
        name: [{one["name"]: one for one in graph[side]} for side in ("inputs", "outputs")]
        for name, graph in facts["graphs"].items()
    }
    graphs = {name: SimpleNamespace(name=name, inputs=one[0], outputs=one[1]) for name, one in sides.items()}
    session = next(one for one in facts["sessions"] if one["id"] == "edges")
    if mistake is None:
        consumer.check_session(bundle_folder, facts, graphs, session)
        return
    mistake(consumer, monkeypatch)
    with pytest.raises(SystemExit, match="edges"):
        consumer.check_session(bundle_folder, facts, graphs, session)


def _rehash(folder: Path) -> None:
    """Make bundle.json state the hashes of what lies there."""
    facts = json.loads((folder / "bundle.json").read_bytes())
    for name, record in facts["files"].items():
        path = folder / name
        record |= {"size_bytes": path.stat().st_size, "sha256": file_digest(path)}
    (folder / "bundle.json").write_text(json.dumps(facts))


def test_a_wrong_golden_input_or_output_is_noticed(bundle_folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(bundle_folder, copy)
    bundle = open_bundle(copy)
    case = next(one for one in bundle.cases if one.id.startswith("before-") and one.graph == "slm_tree")
    mask = np.fromfile(copy / case.inputs["mask.full"], np.uint16)
    mask[::2] = mask[::2].max()
    mask.tofile(copy / case.inputs["mask.full"])
    _rehash(copy)
    ended = run_consumer(copy)
    assert ended.returncode == 1
    assert f"{case.id}/" in ended.stdout, "the graph's outputs are others"
    assert f"{case.id}: the host feeds another mask.full" in ended.stderr


def test_it_is_short_and_stands_alone() -> None:
    source = SOURCE.read_text()
    tree = ast.parse(source)
    imported = {name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names}
    imported |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    foreign = {name.partition(".")[0] for name in imported} - set(sys.stdlib_module_names)
    assert foreign == {"numpy", "onnxruntime", "onnxruntime_qnn", "tokenizers"}
    lines = source.splitlines()
    assert len(lines) <= LINES and max(map(len, lines)) <= WIDTH


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-32, 2**64 - 1) | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner),
)


@given(VALUES)
def test_its_messagepack_is_msgspecs(value: object) -> None:
    module = load_consumer()
    body = msgspec.msgpack.encode(value)
    stream = io.BytesIO(body)
    assert module.unpack(stream) == value and stream.tell() == len(body)
    if "None" not in repr(value):
        assert module.pack(value) == body


@pytest.mark.parametrize("size", [15, 16, 31, 32, 255, 256, 65535, 65536])
def test_its_messagepack_at_the_edges(size: int) -> None:
    consumer = load_consumer()
    for value in ("a" * size, b"a" * size, [1] * size, [size, -1, size * size]):
        body = msgspec.msgpack.encode(value)
        stream = io.BytesIO(body)
        assert consumer.pack(value) == body and consumer.unpack(stream) == value and stream.tell() == len(body)


def test_its_best_children_are_those_of_a_whole_log_softmax() -> None:
    consumer = load_consumer()
    rng = np.random.default_rng(4)
    levels, scale, zero_point = rng.integers(0, 400, 3000).astype(np.uint16), 0.02, 37  # many ties
    log_q = log_softmax(((levels.astype(np.int64) - zero_point) * scale).astype(np.float32)).astype(np.float32)
    found = consumer.best_children(levels, scale, 32)
    assert [column for column, _ in found] == best_columns(log_q, 32).tolist()
    np.testing.assert_allclose([log for _, log in found], log_q[[column for column, _ in found]], atol=2e-6)


def test_an_slm_with_its_own_vocabulary_is_left_to_the_driver(bundle_folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(bundle_folder, copy)
    facts = json.loads((copy / "bundle.json").read_bytes())
    facts["slm_bridge"] = "tables/slm_bridge.safetensors"
    (copy / "bundle.json").write_text(json.dumps(facts))
    ended = run_consumer(copy, "--server", "http://127.0.0.1:9", "--ids", "1,2")
    assert ended.returncode == 1 and "take driver.pyz" in ended.stderr
    graphs_alone = run_consumer(copy)
    assert graphs_alone.returncode == 0 and "session" not in graphs_alone.stdout
    assert "conversations are left out: this bundle's SLM has a vocabulary of its own" in graphs_alone.stdout
    page = (copy / "BUNDLE.md").read_text()
    assert "driver.pyz" in page
