"""What the engine asks of the models, which `passes/` implements: sessions, parts of a pass, and the clock of a pass.

`SequentialModels` and the CPU clocks are what an engine uses unless it is given others. numpy only.

Legend: N nodes, V vocabulary.
"""

import time
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from hyco_export.protocol import wire
from hyco_export.protocol.acceptance import Judged, Query, look

NS_PER_MS = 1e6


class VerifierSession(Protocol):
    """One session's state in the model: committed ids, their cache, the values that a hand-off sends."""

    def reserve(self, positions: int) -> None:
        """Before the first pass: committed positions that the session will have at most."""
        ...

    def prime(self, ids: np.ndarray) -> np.ndarray:
        """Append ids [n] of the prompt to the committed ones; logits [V] float32 of the last one."""
        ...

    def verify(self, root: int, tokens: np.ndarray, parents: np.ndarray) -> np.ndarray:
        """Forward the root (the newest committed, not yet processed token) and the tree; nothing is committed.

        Returns:
            Logits [N + 1, V] float32 of the rows root, node 0, node 1, ...: soft-capped, -inf for ids that the
            checkpoint's generation config suppresses.
        """
        ...

    def commit(self, accepted: tuple[int, ...]) -> None:
        """Keep the root and these tree rows (a path) of the last `verify`; drop the rest."""
        ...

    def draft(self, root: int, steps: int, restricted: bool = False) -> tuple[int, ...]:
        """The server's own head: chain of `steps` top-1 tokens over the full vocabulary and the whole prefix.

        `restricted`: over the keep set and the window of the head artifact, as the device's head would draft it.
        """
        ...

    def handoff(self, root: int, count: int) -> wire.Handoff:
        """Hand-off for `root`: e(root), h of the newest processed position, K/V of the `count` newest positions."""
        ...

    def close(self) -> None: ...


class Prefill(NamedTuple):
    """A session's part of a pass: the next ids [n] of its prompt."""

    session: VerifierSession
    ids: np.ndarray

    @property
    def rows(self) -> int:
        return len(self.ids)


class Check(NamedTuple):
    """A session's part of a pass: its root and a tree, tokens [N] and parents [N]."""

    session: VerifierSession
    root: int
    tokens: np.ndarray
    parents: np.ndarray

    @property
    def rows(self) -> int:
        return 1 + len(self.tokens)


def row_shares(parts: Sequence[Prefill | Check]) -> list[float]:
    """Each part's share of the rows of its pass."""
    rows = [part.rows for part in parts]
    return [count / sum(rows) for count in rows]


class Chain(NamedTuple):
    """What the server's own head is to draft for a session; the fields are those of `VerifierSession.draft`."""

    session: VerifierSession
    root: int
    steps: int
    restricted: bool = False


class DraftedChain(NamedTuple):
    """What the server's own head drafted, and what that cost."""

    tokens: Sequence[int]
    server_ms: float


class VerifierModels(Protocol):
    """The models that a server's sessions share: several sessions in one pass."""

    def cache_bytes(self, positions: int) -> int:
        """Memory of a session that commits at most this many positions."""
        ...

    def draft(self, chains: Sequence[Chain]) -> list[tuple[int, ...]]:
        """`VerifierSession.draft` of each."""
        ...

    def forward(self, parts: Sequence[Prefill | Check]) -> list[Any]:
        """`VerifierSession.prime` or `.verify` of each: logits [1, V] or [N + 1, V], as `look` reads them. No session
        occurs twice."""
        ...

    def look(self, queries: Sequence[Query]) -> list[Judged | ValueError]:
        """Draws and probabilities of rows of the last pass; an error for those whose logits are not finite."""
        ...


class SequentialModels:
    """`VerifierModels` for sessions that share nothing: in a pass they compute their parts one after the other.

    Args:
        position_bytes: memory that a session takes for each of its positions.
    """

    def __init__(self, position_bytes: int = 0) -> None:
        self._position_bytes = position_bytes

    def cache_bytes(self, positions: int) -> int:
        return positions * self._position_bytes

    def draft(self, chains: Sequence[Chain]) -> list[tuple[int, ...]]:
        return [chain.session.draft(chain.root, chain.steps, chain.restricted) for chain in chains]

    def forward(self, parts: Sequence[Prefill | Check]) -> list[np.ndarray]:
        return [
            part.session.prime(part.ids)[None]
            if isinstance(part, Prefill)
            else part.session.verify(part.root, part.tokens, part.parents)
            for part in parts
        ]

    def look(self, queries: Sequence[Query]) -> list[Judged | ValueError]:
        return [_answer(query) for query in queries]


def _answer(query: Query) -> Judged | ValueError:
    try:
        return look(query)
    except ValueError as error:
        return error


class Clock(Protocol):
    """A stopwatch for work on the current thread."""

    @property
    def name(self) -> str: ...

    def start(self) -> Any:
        """A mark to measure from; only this clock reads it."""
        ...

    def elapsed_ms(self, mark: Any) -> float:
        """Milliseconds since `mark`, queued device work included."""
        ...


class ThreadCpuClock:
    """CPU time of the thread: waits and other sessions do not count. Right where torch uses one thread."""

    name = "thread-cpu"

    def start(self) -> int:
        return time.thread_time_ns()

    def elapsed_ms(self, mark: int) -> float:
        return (time.thread_time_ns() - mark) / NS_PER_MS


class ProcessCpuClock:
    """CPU time of all threads of the process: right where torch works with several threads, which the thread's own
    clock does not see. The event loop that reads requests counts too, some tenths of a millisecond at most."""

    name = "process-cpu"

    def start(self) -> int:
        return time.process_time_ns()

    def elapsed_ms(self, mark: int) -> float:
        return (time.process_time_ns() - mark) / NS_PER_MS
