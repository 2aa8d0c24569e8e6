"""The worker process that runs the vendor's compiler and emulator, seen from its parent, and the messages between them.

One process per job or open graph: the vendor's state is per process, its libraries print at file-descriptor level, and
a damaged binary can crash them. The worker ends when its parent does. Messages are MessagePack values, each after its
length; `graph.qnn_worker` is the other end.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self, TypeVar, cast

import msgspec
import numpy as np

import hyco_export
from hyco_export.core.device_spec import GraphSpec, TensorSpec
from hyco_export.core.targets import Target
from hyco_export.errors import CompileError
from hyco_export.graph.qnn_errors import explain, passed_on

WORKER_COMMAND = ("-P", "-m", "hyco_export.graph.qnn_worker")  # -P: nothing in the working folder shadows a module
PACKAGE_ROOT = Path(hyco_export.__file__).resolve().parent.parent
CLOSE_GRACE_S = 5.0  # an idle worker ends in milliseconds once its input is closed
LENGTH_BYTES = 8  # little-endian, before every message
Message = TypeVar("Message")
Expected = TypeVar("Expected")


class TwoBit(msgspec.Struct, frozen=True):
    """Weights to store in 2 bits: a backend built for it (`graph.smaller_binaries`) and the tensors' names."""

    library: str
    names: tuple[str, ...]


class CompileJob(msgspec.Struct, frozen=True, tag=True):
    """Compile `model` into `context_model` and the binary beside it."""

    model: str
    context_model: str
    target: Target
    explain_fallback: bool = False  # let nodes fall back to the CPU and have the provider log why
    two_bit: TwoBit | None = None


class SharedCompileJob(msgspec.Struct, frozen=True, tag=True):
    """Compile `models` into one binary beside the first of `context_models`."""

    models: tuple[str, ...]
    context_models: tuple[str, ...]
    target: Target
    two_bit: TwoBit | None = None


class OpenJob(msgspec.Struct, frozen=True, tag=True):
    """Load a context binary and keep it ready."""

    context_model: str
    target: Target


class InspectJob(msgspec.Struct, frozen=True, tag=True):
    """Read a context binary's description of itself."""

    binary: str


class Array(msgspec.Struct, frozen=True, array_like=True):
    """An array in a message."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


class RunJob(msgspec.Struct, frozen=True, tag=True):
    """Run the open graph once."""

    feeds: dict[str, Array]


class Compiled(msgspec.Struct, frozen=True, tag=True):
    """A finished compilation."""

    wall_s: float
    cpu_s: float
    peak_rss_bytes: int
    two_bit_weights: int = 0  # stored in 2 bits


class Opened(msgspec.Struct, frozen=True, tag=True):
    """An open graph: its inputs and outputs (no encodings: the caller's spec has them)."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]


class GraphInfo(msgspec.Struct, frozen=True):
    """One graph of a context binary."""

    spec: GraphSpec
    spill_fill_bytes: int
    vtcm_bytes: int
    optimisation_level: int  # htp_graph_finalization_optimization_mode; 0 = the compiler's default


class ContextInfo(msgspec.Struct, frozen=True, tag=True):
    """A context binary's description of itself."""

    backend_id: int  # 6 = HTP
    build_id: str
    htp_arch: int
    soc_model: int
    soc: str | None  # the vendor's name, from the compiler's own note in the file
    graphs: tuple[GraphInfo, ...]


class Outputs(msgspec.Struct, frozen=True, tag=True):
    """The outputs of one run."""

    arrays: dict[str, Array]


class Failed(msgspec.Struct, frozen=True, tag=True):
    """A job that raised; the worker accepts further jobs. `hint`: the next step where the error has one, else None."""

    error: str
    hint: str | None = None


Job = CompileJob | SharedCompileJob | OpenJob | InspectJob | RunJob
Reply = Compiled | Opened | ContextInfo | Outputs | Failed


def pack_arrays(arrays: Mapping[str, np.ndarray]) -> dict[str, Array]:
    """Arrays by name, as they travel in a message."""
    return {name: Array(array.dtype.name, array.shape, array.tobytes()) for name, array in arrays.items()}


def unpack_arrays(arrays: Mapping[str, Array]) -> dict[str, np.ndarray]:
    """Inverse of `pack_arrays`; the arrays are read-only views of the message."""
    return {name: np.frombuffer(a.data, dtype=a.dtype).reshape(a.shape) for name, a in arrays.items()}


def write_message(stream: BinaryIO, message: object) -> None:
    """Send one message."""
    body = msgspec.msgpack.encode(message)
    stream.write(len(body).to_bytes(LENGTH_BYTES, "little"))
    stream.write(body)
    stream.flush()


def read_message(stream: BinaryIO, kind: type[Message]) -> Message | None:
    """Receive one message of `kind`, or None when the other side is gone."""
    head = stream.read(LENGTH_BYTES)
    if len(head) < LENGTH_BYTES:
        return None
    length = int.from_bytes(head, "little")
    body = stream.read(length)
    return msgspec.msgpack.decode(body, type=kind) if len(body) == length else None


class Worker:
    """A running worker. What the vendor's libraries print is appended to `log`, or dropped where it is None.

    Args:
        wheel: a folder with another onnxruntime-qnn, which the worker takes in place of the installed one.
    """

    def __init__(self, log: Path | None, command: Sequence[str] = WORKER_COMMAND, wheel: Path | None = None) -> None:
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
                env=_environment(wheel),
            )

    def ask(self, job: Job, reply_kind: type[Expected], subject: str) -> Expected:
        """Send `job` and wait for its answer; threads take turns. `subject` names the graph or file in errors.

        Raises:
            CompileError: the job failed, or the worker died.
        """
        try:
            with self._one_at_a_time:
                write_message(cast(BinaryIO, self._process.stdin), job)
                reply = read_message(cast(BinaryIO, self._process.stdout), cast(type[Reply], Reply))
        except BrokenPipeError:
            reply = None
        except BaseException:  # interrupted in the middle of an answer: the next read would start inside it
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


def _environment(wheel: Path | None) -> dict[str, str]:
    """This process's environment, with which the worker imports the same package, and what is in `wheel` first."""
    path = os.environ.get("PYTHONPATH")
    first = [] if wheel is None else [str(wheel)]
    return {**os.environ, "PYTHONPATH": os.pathsep.join([*first, str(PACKAGE_ROOT), *([path] if path else [])])}
