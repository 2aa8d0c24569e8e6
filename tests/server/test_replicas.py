"""Two replicas on one machine, one killed in the middle of generations: no committed token is lost or changed."""

import ipaddress
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from hyco_export.device.calls import RetryingTransport
from hyco_export.device.client import HttpTransport
from hyco_export.device.driver import generate
from hyco_export.device.interfaces import Request
from hyco_export.errors import ServerError
from hyco_export.protocol import wire
from hyco_export.protocol.trace import GenerationTrace
from hyco_export.server import replicas as replicas_module
from hyco_export.server.replicas import serve_replicas
from tests.support.oracle import OracleDrafter
from tests.support.scripted import ToyLanguageModel

MODEL = ToyLanguageModel(seed=5, stop_bias=-1e9)
CLIENTS, CAP = 16, 60  # with so many, each replica has some
PROMPT = [5, 9, 2, 7]


def test_without_ray_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ServerError, match=r"several replicas need Ray Serve \(pip install 'hyco-export\[ray\]'\)"):
        serve_replicas(lambda: None, 2, "127.0.0.1", 1, lambda _host, _port: None)  # type: ignore[arg-type,return-value]


SERVER = (sys.executable, str(Path(__file__).parents[1] / "support" / "replica_server.py"))


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}


@pytest.fixture
def folder() -> Iterator[Path]:
    """A temporary folder of its own for Ray, with a path short enough for its sockets."""
    with tempfile.TemporaryDirectory(prefix="r", ignore_cleanup_errors=True) as name:
        yield Path(name)


@pytest.fixture
def served() -> Iterator[tuple[str, psutil.Process]]:
    """URL of two replicas, and the process that started them."""
    pytest.importorskip("ray")
    with subprocess.Popen(SERVER, stdout=subprocess.PIPE, text=True, env=environment()) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "a word at the start\n"  # of both, told once, before the server is ready
        url = process.stdout.readline().strip()
        assert url.startswith("http://"), "the replicas did not start"
        try:
            yield url, psutil.Process(process.pid)
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(timeout=60)


@pytest.mark.slow
def test_every_port_is_on_the_loopback_address(served: tuple[str, psutil.Process]) -> None:
    _, process = served
    addresses = [
        ipaddress.ip_address(connection.laddr.ip)
        for member in (process, *process.children(recursive=True))
        for connection in member.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    ]
    assert len(addresses) > 5  # Ray's own, too
    for address in addresses:
        assert (getattr(address, "ipv4_mapped", None) or address).is_loopback, address


@pytest.mark.slow
def test_why_a_replica_does_not_start_is_said_as_a_single_server_says_it() -> None:
    pytest.importorskip("ray")
    run = subprocess.run([*SERVER, "broken"], capture_output=True, text=True, env=environment(), timeout=180)
    assert run.stdout == "refused: model.safetensors is damaged (fetch it again)\nstopped\n"
    assert "Traceback" not in run.stderr


def test_a_ray_that_opens_its_ports_in_another_way_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    private = pytest.importorskip("ray.serve._private.replica")
    monkeypatch.delattr(private, replicas_module.OPENS_PORT)
    with pytest.raises(ServerError, match="perhaps on all interfaces"):
        replicas_module._start(lambda: pytest.fail("built"), tmp_path)
    assert (tmp_path / replicas_module.FAILURE).exists()  # the command says it


@pytest.mark.slow
@pytest.mark.parametrize(("number", "after_s"), [(signal.SIGTERM, 2.0), (signal.SIGTERM, 8.0), (signal.SIGINT, 8.0)])
def test_a_stop_while_replicas_start_leaves_nothing(folder: Path, number: signal.Signals, after_s: float) -> None:
    pytest.importorskip("ray")
    own = {**environment(), "TMPDIR": str(folder)}
    with subprocess.Popen([*SERVER, "slow"], stdout=subprocess.PIPE, text=True, env=own) as process:
        time.sleep(after_s)
        members = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(number)
        said, _ = process.communicate(timeout=60)
    assert "http://" not in said
    assert not list(folder.glob("hyco-ray-*"))
    assert not psutil.wait_procs(members, timeout=20)[1]


@pytest.mark.slow
def test_replicas_that_do_not_start_leave_nothing(folder: Path) -> None:
    pytest.importorskip("ray")
    own = {**environment(), "TMPDIR": str(folder)}
    run = subprocess.run([*SERVER, "broken"], capture_output=True, text=True, env=own, timeout=180)
    assert not list(folder.glob("hyco-ray-*"))
    assert run.stderr == ""  # no word of Ray's own


def replica_pids(process: psutil.Process) -> list[int]:
    return [child.pid for child in process.children(recursive=True) if "ray::ServeReplica" in " ".join(child.cmdline())]


@pytest.mark.slow
def test_a_killed_replica_costs_no_token_and_touches_no_session_of_the_other(
    served: tuple[str, psutil.Process],
) -> None:
    url, process = served
    replicas = replica_pids(process)
    assert len(replicas) == 2
    traces: dict[int, GenerationTrace] = {}
    errors: list[Exception] = []

    def client(number: int) -> None:
        transport = RetryingTransport(HttpTransport(url), 120.0)
        drafter = OracleDrafter(
            MODEL.greedy, 1
        )  # two tokens a round: thirty rounds, each of 30 ms and the others' turns
        request = Request("toy", str(number), wire.Sampling(0.0, 64, 0.95), wire.EXACT, 3, CAP)
        try:
            traces[number] = generate(PROMPT, request, drafter, transport)
        except Exception as error:  # seen by the test, not lost with the thread
            errors.append(error)

    threads = [threading.Thread(target=client, args=(number,)) for number in range(CLIENTS)]
    for thread in threads:
        thread.start()
    time.sleep(1.5)  # in the middle: a generation takes seconds
    os.kill(replicas[0], signal.SIGKILL)
    for thread in threads:
        thread.join(timeout=180)
    assert not errors
    expected = tuple(MODEL.answer(PROMPT, CAP))
    assert [traces[number].tokens for number in range(CLIENTS)] == [expected] * CLIENTS
    primes = [len(traces[number].primes) for number in range(CLIENTS)]
    assert max(primes) > 1, "no session was on the killed replica"
    assert min(primes) == 1, "sessions of the other replica were lost, too: calls did not stick"
    assert replicas[1] in replica_pids(process)
