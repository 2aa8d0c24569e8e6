"""What a running server counts and logs: Prometheus metrics, places of errors.

None of it holds ids, prompts or names of sessions.
"""

import traceback
from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

CONTENT_TYPE = CONTENT_TYPE_LATEST
MS_BUCKETS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000)
COMMITTED_BUCKETS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 33)


class Metrics:
    """Counters of one server."""

    def __init__(self, session_count: Callable[[], int], prefilled: Callable[[], int]) -> None:
        self.registry = CollectorRegistry()
        self._requests = Counter("hyco_requests", "Calls answered, by call", ["call"], registry=self.registry)
        self._refusals = Counter("hyco_refusals", "Calls refused, by code", ["code"], registry=self.registry)
        self._tokens = Counter(
            "hyco_committed_tokens", "Tokens in replies, repeated rounds included", registry=self.registry
        )
        self._bytes_up = Counter("hyco_body_bytes_up", "Bytes of request bodies", registry=self.registry)
        self._bytes_down = Counter("hyco_body_bytes_down", "Bytes of reply bodies", registry=self.registry)
        self._padding = Counter("hyco_padding_bytes", "Bytes of reply bodies that are padding", registry=self.registry)
        self._committed = Histogram(
            "hyco_round_tokens", "Tokens in the reply to a round", buckets=COMMITTED_BUCKETS, registry=self.registry
        )
        self._server_ms = Histogram(
            "hyco_server_ms", "Server time of a call", ["call"], buckets=MS_BUCKETS, registry=self.registry
        )
        sessions = Gauge("hyco_sessions", "Sessions held", registry=self.registry)
        sessions.set_function(session_count)
        waiting = Gauge(
            "hyco_prefilled_ids", "Ids processed of prompts that wait for their first token", registry=self.registry
        )
        waiting.set_function(prefilled)

    def answered(self, call: str, bytes_up: int, bytes_down: int) -> None:
        self._requests.labels(call).inc()
        self._bytes_up.inc(bytes_up)
        self._bytes_down.inc(bytes_down)

    def primed(self, server_ms: float) -> None:
        self._tokens.inc()
        self._server_ms.labels("prime").observe(server_ms)

    def verified(self, tokens: int, server_ms: float) -> None:
        self._tokens.inc(tokens)
        self._committed.observe(tokens)
        self._server_ms.labels("verify").observe(server_ms)

    def padded(self, padding_bytes: int) -> None:
        self._padding.inc(padding_bytes)

    def refused(self, code: str) -> None:
        self._refusals.labels(code).inc()

    def text(self) -> bytes:
        """The exposition."""
        return generate_latest(self.registry)


def place_of(error: BaseException) -> str:
    """Class and frames of an error and of its causes, for a log: no messages or values, which may hold a prompt."""
    lines = []
    seen: BaseException | None = error
    while seen is not None:
        frames = traceback.StackSummary.extract(traceback.walk_tb(seen.__traceback__))
        where = "".join(f"\n    {frame.filename}:{frame.lineno} in {frame.name}" for frame in frames)
        lines.append(f"{type(seen).__name__}{where}")
        seen = seen.__cause__ or (None if seen.__suppress_context__ else seen.__context__)
    return "\n  caused by ".join(lines)
