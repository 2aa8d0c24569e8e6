"""Compares the texts and the speed of several programs that answer the same prompts greedily, in turn.

A contestant is one of our systems, or a worker: a process, possibly of another Python, that reads a JSON line for each
prompt and writes one for its answer. Tokens per second are all tokens of all answers over the time of all answers,
prefill included. MAT counts the tokens after each answer's first one, which is part of the prefill.
"""

import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

import msgspec

from hyco_export.device.drafters import NullDrafter
from hyco_export.device.driver import generate
from hyco_export.device.interfaces import Request, Transport
from hyco_export.errors import HycoError
from hyco_export.evaluate.runs import GREEDY
from hyco_export.protocol import wire

WARM_UP_PROMPTS = 2  # answered by all before anything is measured: fills caches, runs compilers


class Answer(msgspec.Struct, frozen=True):
    """One prompt's new tokens; `rounds`: passes of the verifier after the prefill."""

    tokens: tuple[int, ...]
    seconds: float
    rounds: int


class Contestant(Protocol):
    """A program that answers prompts."""

    @property
    def name(self) -> str: ...

    def answer(self, ids: Sequence[int], max_new_tokens: int) -> Answer: ...


class Standing(msgspec.Struct, frozen=True):
    """One contestant's totals over all prompts."""

    name: str
    tokens: int
    seconds: float
    rounds: int
    answers: int
    differing: tuple[str, ...]  # prompts whose text is not the first contestant's

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds

    @property
    def mat(self) -> float:
        """Mean tokens committed by a round."""
        return (self.tokens - self.answers) / self.rounds if self.rounds else 0.0


class Comparison(msgspec.Struct, frozen=True):
    """Standings in the order of the contestants; the first one is ours."""

    standings: tuple[Standing, ...]

    @property
    def same_text(self) -> bool:
        """Are all answers equal, token for token?"""
        return not any(standing.differing for standing in self.standings)

    def ratio(self, name: str) -> float:
        """Our tokens per second over those of `name`."""
        return self.standings[0].tokens_per_s / self.find(name).tokens_per_s

    def find(self, name: str) -> Standing:
        """The standing of one contestant. Raises StopIteration: there is none of this name."""
        return next(standing for standing in self.standings if standing.name == name)


def compare(
    contestants: Sequence[Contestant],
    prompts: Sequence[tuple[str, Sequence[int]]],
    max_new_tokens: int,
    on_step: Callable[[str, int, int], None] = lambda _label, _done, _total: None,
) -> Comparison:
    """Measure the contestants; all answer a prompt before the next one, so that other load slows all of them alike.

    Args:
        contestants: each goes first in turn.
        prompts: (prompt id, token ids) pairs.
    """
    for _, ids in prompts[:WARM_UP_PROMPTS]:
        for contestant in contestants:
            contestant.answer(ids, max_new_tokens)
    answers: dict[str, list[Answer]] = {contestant.name: [] for contestant in contestants}
    for done, (_, ids) in enumerate(prompts):
        first = done % len(contestants)
        for contestant in (*contestants[first:], *contestants[:first]):
            answers[contestant.name].append(contestant.answer(ids, max_new_tokens))
        on_step("prompts answered by everybody", done + 1, len(prompts))
    ours = answers[contestants[0].name]
    return Comparison(
        tuple(
            Standing(
                name=name,
                tokens=sum(len(answer.tokens) for answer in theirs),
                seconds=sum(answer.seconds for answer in theirs),
                rounds=sum(answer.rounds for answer in theirs),
                answers=len(theirs),
                differing=tuple(
                    prompt_id
                    for (prompt_id, _), mine, other in zip(prompts, ours, theirs, strict=True)
                    if mine.tokens != other.tokens
                ),
            )
            for name, theirs in answers.items()
        )
    )


# ---- our systems


class CloudMtp:
    """The server drafts with its own head; the device sends only the digest of its committed tokens."""

    name = "hyco-export cloud-mtp"

    def __init__(self, transport: Transport, steps: int) -> None:
        self._transport = transport
        self._steps = steps

    def answer(self, ids: Sequence[int], max_new_tokens: int) -> Answer:
        """From the request to the last token, everything on the way included.

        Raises:
            HycoError: a call was repeated or a session lost, so that the time is not that of an answer.
        """
        request = Request(self.name, "", GREEDY, wire.EXACT, 0, max_new_tokens, "server", self._steps)
        start_s = time.perf_counter()
        trace = generate(ids, request, NullDrafter(), self._transport)
        # the first call may find its session expired: the others answer in between
        disturbed = [call for call in trace.disturbed if call is not trace.primes[0]]
        if disturbed:
            raise HycoError(
                f"{len(disturbed)} calls were sent again or made for a lost session: the time is that of an outage",
                "run the command again; the server's log says what ended its sessions",
            )
        return Answer(trace.tokens, time.perf_counter() - start_s, len(trace.rounds))


# ---- other programs

STOP_TIMEOUT_S = 20


class WorkerPeer:
    """A worker process; used as a context manager, it ends with the block.

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
        """The worker's next JSON line; its libraries may print other lines."""
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
    """Refuse a Python without vLLM before anything is started.

    Raises:
        HycoError: it cannot be run, or cannot import vllm.
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
    # vLLM's CPU build wants Intel's OpenMP library to be loaded first, where the environment has it
    libiomp = python.parent.parent / "lib" / "libiomp5.so"
    preload = {"LD_PRELOAD": str(libiomp)} if libiomp.is_file() else {}
    return WorkerPeer(name, command, {**_threads(threads), **preload, "VLLM_CPU_KVCACHE_SPACE": "1"})


def _threads(count: int) -> dict[str, str]:
    return {"OMP_NUM_THREADS": str(count)}
