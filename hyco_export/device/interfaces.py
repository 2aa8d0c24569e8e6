"""What the parts of the device expect of each other: a request, head and SLM, a transport, and what a reply brings."""

from collections.abc import Sequence
from typing import Protocol

import msgspec
import numpy as np

from hyco_export.core.handoff import KvRows
from hyco_export.protocol import wire
from hyco_export.protocol.wire import Traffic

ID_LIMIT = 1 << 31  # of every token id: the digest of committed ids takes them as int32


class Request(msgspec.Struct, frozen=True):
    """What a generation asks of the server; `system` and `prompt_id` only stand in the trace.

    `stop_ids` are the server's: tokens that the device keeps end the answer in the same way. Ids of `vocab_size` and
    above are taken from no server.
    """

    system: str
    prompt_id: str
    sampling: wire.Sampling
    acceptance: wire.Acceptance
    seed: int
    max_new_tokens: int
    draft_side: wire.DraftSide = "device"
    draft_steps: int = 0
    head_digest: str = ""
    trace: bool = False  # ask for what each round was judged by
    stop_ids: tuple[int, ...] = ()
    draft_scope: wire.DraftScope = "full"
    first_rows: int = 0  # K/V rows of the first reply, the rest after it; 0: the whole window at once (HyCo, §3.1)
    vocab_size: int = ID_LIMIT

    def prime_request(self, ids: Sequence[int], prompt_length: int, *, unverified: bool) -> wire.PrimeRequest:
        """The PRIME message for committed `ids`, whose first `prompt_length` are the prompt.

        `unverified`: may the device keep tokens that no verifier chose.
        """
        return wire.PrimeRequest(
            version=wire.PROTOCOL_VERSION,
            prompt=list(ids),
            sampling=self.sampling,
            acceptance=self.acceptance,
            seed=self.seed,
            max_new_tokens=self.max_new_tokens,
            draft_side=self.draft_side,
            draft_steps=self.draft_steps,
            head_digest=self.head_digest,
            continue_from=len(ids) - prompt_length,
            trace=self.trace,
            draft_scope=self.draft_scope,
            unverified=unverified,
            first_rows=self.first_rows,
        )


class HeadDraft(msgspec.Struct, frozen=True):
    """Verifier ids: the chain [K] and the runner-ups [S] of its first S steps."""

    chain: tuple[int, ...]
    runner_ups: tuple[int, ...]


class HeadDevice(Protocol):
    """The MTP head on the device with its hand-off ring."""

    def reset(self) -> None:
        """Forget every row."""
        ...

    def commit(self, rows: KvRows, first_position: int) -> None:
        """Copy K/V rows of consecutive positions into the ring, behind its newest row or before its oldest."""
        ...

    def draft(self, e: np.ndarray, h: np.ndarray, root_position: int) -> HeadDraft:
        """e, h uint8 [H]; ring holds positions < root_position."""
        ...

    def close(self) -> None:
        """Release what runs the graph."""
        ...


class SlmDevice(Protocol):
    """The SLM on the device with its K/V rings."""

    @property
    def rows(self) -> int:
        """Rows of one tree pass."""
        ...

    @property
    def length(self) -> int:
        """Positions committed to the rings so far."""
        ...

    @property
    def context(self) -> int:
        """Newest positions that the largest ring holds; prefilling more is wasted."""
        ...

    def fits(self, tokens: np.ndarray, others: int) -> bool:
        """Can one pass hold these tokens [n] beside `others` rows."""
        ...

    def reset(self, position: int = 0) -> None:
        """Empty the rings; the next position is `position`, and earlier ones are never seen."""
        ...

    def prefill(self, tokens: np.ndarray) -> None:
        """Append tokens [n] to the rings at positions length .. length + n - 1."""
        ...

    @property
    def next_row(self) -> int:
        """Number of the first row of the next tree pass: rows are numbered on from pass to pass."""
        ...

    def tree_pass(self, tokens: np.ndarray, parents: np.ndarray) -> np.ndarray:
        """Natural log-probabilities [R, C] over the keep set for rows of a forest on top of the rings.

        tokens [R], parents [R] (index in this pass or -1: child of the newest committed position).
        """
        ...

    def commit(self, rows: np.ndarray) -> None:
        """Copy the K/V of these rows, by number and of any pass, into the rings: a path from the rings' end on."""
        ...

    def forget(self, before: int) -> None:
        """Rows numbered below `before` will not be committed any more."""
        ...

    def close(self) -> None:
        """Release what runs the graphs."""
        ...


class Transport(Protocol):
    """Client side of the wire; raises errors.ServerError (unreachable) or errors.ProtocolError (a typed refusal)."""

    def info(self) -> wire.ServerInfo: ...

    def prime(self, request: wire.PrimeRequest) -> wire.PrimeReply: ...

    def verify(self, session: str, round_number: int, request: wire.VerifyRequest) -> wire.VerifyReply: ...

    def close_session(self, session: str) -> None: ...

    @property
    def traffic(self) -> "Traffic":
        """Bytes of the last call."""
        ...


class Given(msgspec.Struct, frozen=True):
    """What a reply gives to the drafter: the head's hand-off, or the chain that the server's head drafted for it.

    `link_ms`: how long the device waited for it beyond the server's own time.
    """

    handoff: wire.Handoff | None = None
    chain: tuple[int, ...] = ()
    link_ms: float = 0.0
