"""The interfaces inside the server: between engine and models (`passes/` implements them), and between session access
and engine.

Legend: R rows of a pass, N nodes, H hidden, V vocabulary, C kept tokens. numpy only.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import NamedTuple, Protocol

import msgspec
import numpy as np

from hyco_export.protocol import wire


class RowOutputs(msgspec.Struct, frozen=True):
    """Outputs of a verify forward for the rows root, node 0, node 1, ...: logits [N + 1, V] float32, soft-capped;
    -inf for ids that the checkpoint's generation config suppresses."""

    logits: np.ndarray


class VerifierSession(Protocol):
    """One session's state on the server: committed ids, their cache, the hand-off sources."""

    def reserve(self, positions: int) -> None:
        """Before the first pass: committed positions that the session will have at most."""
        ...

    def prime(self, ids: np.ndarray) -> np.ndarray:
        """Append ids [n] of the prompt to the committed ones; logits [V] float32 of the last one."""
        ...

    def verify(self, root: int, tokens: np.ndarray, parents: np.ndarray) -> RowOutputs:
        """Forward the root (the newest committed, not yet processed token) and the tree; caches nothing for good."""
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


class Chain(NamedTuple):
    """What the server's own head is to draft for a session; the fields are those of `VerifierSession.draft`."""

    session: VerifierSession
    root: int
    steps: int
    restricted: bool = False


class VerifierModels(Protocol):
    """The models that a server's sessions share: several sessions in one pass."""

    def cache_bytes(self, positions: int) -> int:
        """Memory of a session that commits at most this many positions."""
        ...

    def draft(self, chains: Sequence[Chain]) -> list[tuple[int, ...]]:
        """`VerifierSession.draft` of each."""
        ...

    def forward(self, parts: Sequence[Prefill | Check]) -> list[np.ndarray]:
        """`VerifierSession.prime` or `.verify` of each: logits [V] or [N + 1, V]. No session occurs twice."""
        ...


Gone = Callable[[], bool]  # has the caller gone away: asked before each pass that is made for it


def never_gone() -> bool:
    """`Gone` of a caller that waits for its reply whatever happens."""
    return False


class EnginePort(Protocol):
    """What `engine.Engine` offers to session access; callable from any thread."""

    def prime(self, request: wire.PrimeRequest, gone: Gone = never_gone) -> wire.PrimeReply: ...

    def start_round(
        self, session_id: str, round_number: int, request: wire.VerifyRequest, gone: Gone = never_gone
    ) -> "Future[wire.VerifyReply]": ...

    def close(self, session_id: str) -> None: ...

    def held(self) -> Mapping[str, "Held"]:
        """The sessions that have not been dropped, by id."""
        ...


class Held(msgspec.Struct, frozen=True):
    """A session that an engine holds.

    expires_s: until it is forgotten if nobody calls it; None while a call of it is in flight. spare: it has finished,
    and nobody calls it: it only keeps its last reply.
    """

    expires_s: float | None
    spare: bool
