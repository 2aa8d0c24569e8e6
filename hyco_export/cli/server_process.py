"""A server in a process of its own for the length of a validation, stopped whatever happens to the parent."""

import ctypes
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hyco_export.errors import ServerError

STOP_TIMEOUT_S = 20
PR_SET_PDEATHSIG = 1  # linux/prctl.h: signal to get when the parent dies
URL_LINE = re.compile(r"serving on (https?://\S+)")


@contextmanager
def server_process(recipe: Path | None, run_dir: Path) -> Iterator[str]:
    """Start `hyco-export serve` on a free port of this machine and yield its URL once it is ready.

    Raises:
        ServerError: it ended before it was ready; the log holds the reason.
    """
    command = [sys.executable, "-m", "hyco_export", "serve", "--port", "0", "--run", str(run_dir)]
    if recipe is not None:
        command += ["--recipe", str(recipe)]
    log = run_dir / "server.log"
    with log.open("w") as errors:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, preexec_fn=_die_with_parent
        )
    try:
        yield _wait_for_url(process, log)
    finally:
        process.terminate()
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        assert process.stdout is not None
        process.stdout.close()


def _wait_for_url(process: "subprocess.Popen[str]", log: Path) -> str:
    assert process.stdout is not None
    for line in process.stdout:
        if match := URL_LINE.search(line):
            return match.group(1)
    last = log.read_text(errors="replace").strip().splitlines()[-1:]
    raise ServerError(f"the server ended before it was ready: {' '.join(last)}", f"read {log}")


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
