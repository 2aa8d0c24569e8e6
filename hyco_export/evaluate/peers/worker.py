"""A contestant in a process of its own, which may run another Python: one JSON line for a prompt, one for its answer.

Knows the lines: `{"ids": [...], "max_new_tokens": n}` in, `{"tokens": [...], "seconds": s, "rounds": r}` out, and
`{"ready": true}` once, when the models are loaded. What stands between is the worker's.
"""

import os
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from hyco_export.errors import HycoError
from hyco_export.evaluate.peers.comparison import Answer

STOP_TIMEOUT_S = 20


class WorkerPeer:
    """Use as a context manager: the process ends with the block.

    Args:
        name: what the contestant is called.
        command: starts the worker.
        environment: variables set beside this process's.

    Raises:
        HycoError: it ended before it was ready, or in the middle of an answer.
    """

    def __init__(self, name: str, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self.name = name
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  # closed in __exit__
        self._process = subprocess.Popen(
            list(command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env={**os.environ, **environment},
        )

    def __enter__(self) -> Self:
        self._read()
        return self

    def answer(self, ids: Sequence[int], max_new_tokens: int) -> Answer:
        assert self._process.stdin is not None
        request = msgspec.json.encode({"ids": list(ids), "max_new_tokens": max_new_tokens}).decode()
        with suppress(BrokenPipeError):  # it has ended: what it said last is read all the same
            self._process.stdin.write(request + "\n")
            self._process.stdin.flush()
        return msgspec.json.decode(self._read(), type=Answer)

    def _read(self) -> str:
        """The next line that is the worker's; libraries print lines of their own."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                return line
        self._errors.seek(0)
        last = self._errors.read().strip().splitlines()[-1:]
        raise HycoError(f"{self.name} ended: {' '.join(last) or 'without a word'}", "run its worker by hand")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._errors.close()


def transformers_peer(python: Path, verifier: Path, head: Path | None, threads: int, dtype: str) -> WorkerPeer:
    """transformers' own generation; assisted with the head where one is given."""
    script = Path(__file__).with_name("transformers_worker.py")
    name = "transformers, assisted" if head else "transformers, plain"
    command = [str(python), str(script), str(verifier), str(head or ""), dtype, str(threads)]
    return WorkerPeer(name, command, _threads(threads))


def require_vllm(python: Path) -> None:
    """Before anything is started.

    Raises:
        HycoError: no such Python, or one without vLLM.
    """
    hint = "install its CPU build there, or leave --vllm-python out"
    try:
        found = subprocess.run([str(python), "-c", "import vllm"], capture_output=True, text=True)
    except OSError as error:
        raise HycoError(f"{python} is no Python that can be run: {error.strerror}", hint) from error
    if found.returncode != 0:
        last = found.stderr.strip().splitlines()[-1:]
        raise HycoError(f"{python} cannot import vllm: {' '.join(last)}", hint)


def vllm_peer(python: Path, verifier: Path, head: Path | None, threads: int, dtype: str, steps: int) -> WorkerPeer:
    """vLLM in a Python that `require_vllm` takes; with multi-token prediction where a head is given."""
    script = Path(__file__).with_name("vllm_worker.py")
    name = "vLLM, MTP" if head else "vLLM, plain"
    command = [str(python), str(script), str(verifier), str(head or ""), dtype, str(steps)]
    # bound to libiomp where the environment brings it: vLLM asks for it
    libiomp = python.parent.parent / "lib" / "libiomp5.so"
    preload = {"LD_PRELOAD": str(libiomp)} if libiomp.is_file() else {}
    return WorkerPeer(name, command, {**_threads(threads), **preload, "VLLM_CPU_KVCACHE_SPACE": "1"})


def _threads(count: int) -> dict[str, str]:
    return {"OMP_NUM_THREADS": str(count)}
