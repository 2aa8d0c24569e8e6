"""`hyco-export serve` as a child process for the length of a validation or benchmark; it ends with its parent."""

import ctypes
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from hyco_export.errors import ServerError, UnreachableError

STOP_TIMEOUT_S = 20
PR_SET_PDEATHSIG = 1  # linux/prctl.h: signal to get when the parent dies
EXIT_S = 1.0  # between a connection that a dying process closes, and its end
LAST_LINES = 3  # of the log, in an error
URL_LINE = re.compile(r"serving on (https?://\S+)")


class ServerProcess:
    """A server of ours that runs, its URL and its log."""

    def __init__(
        self, process: subprocess.Popen[str], url: str, log: Path, kept: Callable[[], str] = lambda: ""
    ) -> None:
        self._process = process
        self.url = url
        self._log = log
        self._kept = kept

    def require_running(self) -> None:
        """Asked after a call that got no answer.

        Raises:
            ServerError: the process has ended: how, and what it said last.
        """
        try:
            self._process.wait(EXIT_S)
        except subprocess.TimeoutExpired:
            return
        raise _ended(self._process, self._log, "in the middle of the work", self._kept())


@contextmanager
def server_process(
    recipe: Path | None, run_dir: Path, kept: Callable[[], str] = lambda: "", device: str | None = None
) -> Iterator[ServerProcess]:
    """Start `hyco-export serve` on a free port of this machine and yield it once it is ready.

    Args:
        kept: what is finished and stays when the server ends, in words; "" for nothing.
        device: where the verifier runs; None leaves it to `serve`.

    Raises:
        ServerError: it ended before it was ready, or while calls waited for it; the log holds the reason.
    """
    command = [sys.executable, "-m", "hyco_export", "serve", "--port", "0", "--run", str(run_dir)]
    if recipe is not None:
        command += ["--recipe", str(recipe)]
    if device is not None:
        command += ["--device", device]
    log = run_dir / "server.log"
    with log.open("w") as errors:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, preexec_fn=_die_with_parent
        )
    try:
        server = ServerProcess(process, _wait_for_url(process, log), log, kept)
        try:
            yield server
        except UnreachableError:
            server.require_running()
            raise
    finally:
        process.terminate()
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        assert process.stdout is not None
        process.stdout.close()


def _wait_for_url(process: subprocess.Popen[str], log: Path) -> str:
    assert process.stdout is not None
    for line in process.stdout:
        if match := URL_LINE.search(line):
            return match.group(1)
    process.wait()
    raise _ended(process, log, "before it was ready")


def _ended(process: subprocess.Popen[str], log: Path, when: str, kept: str = "") -> ServerError:
    code = process.returncode
    how = f"with exit code {code}" if code >= 0 else f"by {signal.Signals(-code).name}"
    last = " / ".join(line.strip() for line in log.read_text(errors="replace").strip().splitlines()[-LAST_LINES:])
    said = f"its last lines: {last}" if last else "it said nothing"
    hint = f"read {shlex.quote(str(log))}" if last else "run it again"
    return ServerError(f"the server ended {when} {how}; {said}", f"{hint}; kept: {kept}" if kept else hint)


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
