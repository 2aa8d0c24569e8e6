"""One answer as a session of the engine in this process: PRIME, then rounds for which the server drafts itself.

The loop of `cloud-mtp` without the wire. It runs on the event loop and waits in the scheduler's queue like any caller.
"""

import asyncio
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NamedTuple

import msgspec

from hyco_export.protocol import wire
from hyco_export.server.engine import Engine
from hyco_export.server.metrics import Metrics
from hyco_export.server.sessions import Cancelled

Work = Callable[..., Awaitable[Any]]  # runs a blocking call on a thread of its own


class Usage(msgspec.Struct, frozen=True):
    """Tokens of prompt and answer, the answer's stop token counted; `server_ms` is ours, the
    sum of what the replies to PRIME and rounds say."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    server_ms: float


class Committed(NamedTuple):
    """What one call of the engine committed; finished: "", "stop" or "length"."""

    tokens: list[int]
    finished: str


class Generation:
    """One session of the engine, from PRIME to its end, driven on the event loop.

    Args:
        work: for PRIME, which waits for the engine.
        cancelled: has the caller gone away.
    """

    def __init__(
        self,
        engine: Engine,
        metrics: Metrics,
        work: Work,
        request: wire.PrimeRequest,
        owner: str,
        cancelled: Cancelled,
    ) -> None:
        self._engine, self._metrics, self._work = engine, metrics, work
        self._request, self._owner, self._cancelled = request, owner, cancelled
        self._ids = array("i", request.prompt)
        self._session = ""
        self._round = 0
        self._first = Committed([], "")
        self._server_ms = 0.0

    @property
    def usage(self) -> Usage:
        prompt, total = len(self._request.prompt), len(self._ids)
        return Usage(prompt, total - prompt, total, self._server_ms)

    async def open(self) -> None:
        """PRIME.

        Raises:
            ProtocolError: as `Engine.prime`.
        """
        reply = await self._work(self._engine.prime, self._request, self._cancelled, self._owner)
        self._session = reply.session
        self._metrics.primed(reply.server_ms)
        self._first = self._take([reply.root], reply.finished, reply.server_ms)

    async def pieces(self) -> AsyncIterator[Committed]:
        """The first token, then what each round commits.

        Raises:
            ProtocolError: as `Engine.start_round`.
        """
        committed = self._first
        yield committed
        while not committed.finished:
            self._round += 1
            body = wire.VerifyRequest(
                wire.PROTOCOL_VERSION, len(self._ids), wire.committed_digest(self._ids), tokens=[], parents=[]
            )
            judged = self._engine.start_round(self._session, self._round, body, self._cancelled, self._owner)
            reply = await asyncio.wrap_future(judged)
            self._metrics.verified(len(reply.tokens), reply.server_ms)
            committed = self._take(reply.tokens, reply.finished, reply.server_ms)
            yield committed

    def close(self) -> None:
        """Free the session, whether it has ended or not."""
        if self._session:
            self._engine.close(self._session, self._owner)

    def _take(self, tokens: list[int], finished: str, server_ms: float) -> Committed:
        self._ids.extend(tokens)
        self._server_ms += server_ms
        return Committed(tokens, finished)
