"""A server of its own that has died ends the wait for it, with how it ended and what it said."""

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from hyco_export.cli import server_process as module
from hyco_export.cli.server_process import ServerProcess, server_process
from hyco_export.device.calls import RetryingTransport
from hyco_export.errors import ServerError, UnreachableError
from hyco_export.protocol.wire import Traffic

Start = Callable[[str], ServerProcess]


@pytest.fixture
def start(tmp_path: Path) -> Start:
    """A process that runs a script, with its log in `tmp_path`."""

    def started(script: str) -> ServerProcess:
        log = tmp_path / "server.log"
        with log.open("w") as errors:
            process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=errors, text=True)
        return ServerProcess(process, "http://127.0.0.1:9", log)

    return started


class Unanswered:
    """Calls to a server that is away."""

    traffic = Traffic(0, 0, 0, 0)
    calls = 0
    traffic = Traffic(0, 0, 0, 0)

    def info(self) -> None:
        self.calls += 1
        raise UnreachableError("no answer")


def test_a_dead_server_ends_the_wait_with_its_exit_code_and_last_lines(start: Start) -> None:
    server = start("import sys; sys.stderr.write('one\\ntwo\\nthree\\nout of [memory]\\n'); sys.exit(7)")
    inner, pauses = Unanswered(), []
    transport = RetryingTransport(inner, 60.0, pause=pauses.append, still_there=server.require_running)  # type: ignore[arg-type]
    seen = r"ended in the middle of the work with exit code 7; its last lines: two / three / out of \[memory\]"
    with pytest.raises(ServerError, match=seen) as ended:
        transport.info()
    assert not isinstance(ended.value, UnreachableError)
    assert (inner.calls, pauses) == (1, [])


def test_a_killed_server_is_named_by_its_signal(start: Start) -> None:
    with pytest.raises(ServerError, match="by SIGKILL; it said nothing"):
        start(f"import os; os.kill(os.getpid(), {int(signal.SIGKILL)})").require_running()


def test_after_a_silent_end_the_next_step_is_to_run_again_with_what_is_kept(start: Start) -> None:
    server = start("import os; os.kill(os.getpid(), 9)")
    server._kept = lambda: "3 generations in runs/x/bench"
    with pytest.raises(ServerError) as ended:
        server.require_running()
    assert ended.value.hint == "run it again; kept: 3 generations in runs/x/bench"


def test_a_running_server_is_waited_for(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "EXIT_S", 0.01)
    server = start("import threading; threading.Event().wait()")
    server.require_running()
    server._process.kill()
    server._process.wait()


def test_a_server_that_never_gets_ready_says_how_it_ended(tmp_path: Path) -> None:
    with (
        pytest.raises(
            ServerError, match=r"ended before it was ready with exit code 2; its last lines: .*does not exist"
        ),
        server_process(tmp_path / "none.yaml", tmp_path),
    ):
        pass


def test_the_device_is_passed_on_to_the_server(tmp_path: Path) -> None:
    with (
        pytest.raises(ServerError, match=r"'abacus' is not a torch device"),
        server_process(None, tmp_path, device="abacus"),
    ):
        pass
