"""A worker process that holds the vendor's compiler and emulator, seen from the outside.

One process per job or open graph: the vendor's state is per process, its libraries print at file-descriptor level, and
a damaged binary can crash them. The worker ends when its parent does. Knows processes and pipes; not what jobs mean.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self, TypeVar, cast

import hyco_export
from hyco_export.errors import CompileError
from hyco_export.graph.frames import Failed, Job, Reply, read_frame, write_frame
from hyco_export.graph.qnn_errors import explain, passed_on

WORKER_COMMAND = ("-P", "-m", "hyco_export.graph.qnn_worker")  # -P: nothing in the working folder shadows a module
PACKAGE_ROOT = Path(hyco_export.__file__).resolve().parent.parent
CLOSE_GRACE_S = 5.0  # an idle worker ends in milliseconds once its input is closed
Expected = TypeVar("Expected")


class Worker:
    """A running worker. `log` collects what the vendor's libraries print (appended); None throws it away."""

    def __init__(self, log: Path | None, command: Sequence[str] = WORKER_COMMAND) -> None:
        self.log = log
        self._one_at_a_time = threading.Lock()
        if log is not None:
            log.parent.mkdir(parents=True, exist_ok=True)
        with open(os.devnull if log is None else log, "ab") as noise:
            self._process = subprocess.Popen(
                [sys.executable, *command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=noise,
                env=_environment(),
            )

    def ask(self, job: Job, reply_kind: type[Expected], subject: str) -> Expected:
        """Send `job` and wait for its answer; threads take turns. `subject` is what errors call the thing worked on.

        Raises:
            CompileError: the job failed, or the worker died.
        """
        try:
            with self._one_at_a_time:
                write_frame(cast(BinaryIO, self._process.stdin), job)
                reply = read_frame(cast(BinaryIO, self._process.stdout), cast(type[Reply], Reply))
        except BrokenPipeError:
            reply = None
        except BaseException:  # an interrupt in the middle of an answer: the pipe is out of step
            self.kill()
            raise
        if reply is None:
            raise self._death(subject)
        if isinstance(reply, Failed):
            if reply.hint is not None:
                raise passed_on(reply.error, reply.hint, subject, self.log)
            raise explain(reply.error, subject, self.log)
        assert isinstance(reply, reply_kind)
        return reply

    def close(self) -> None:
        """End the worker: close its input, and kill it if it is still busy."""
        if self._process.stdin is not None and not self._process.stdin.closed:
            with contextlib.suppress(BrokenPipeError):  # it is already gone
                self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(CLOSE_GRACE_S)
        self.kill()

    def kill(self) -> None:
        """End the worker at once."""
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None and not stream.closed:
                with contextlib.suppress(BrokenPipeError):  # unsent bytes for a dead worker
                    stream.close()

    def _death(self, subject: str) -> CompileError:
        self.kill()
        code = self._process.returncode
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return CompileError(
            f"the compiler process ended with {how} while working on {subject}",
            "a damaged binary does that; compile it again" if self.log is None else f"its last words are in {self.log}",
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.kill()


def _environment() -> dict[str, str]:
    """This process's environment, in which the worker finds the same package."""
    path = os.environ.get("PYTHONPATH")
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(PACKAGE_ROOT), *([path] if path else [])])}
