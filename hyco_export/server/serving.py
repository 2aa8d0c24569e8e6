"""The application as a process: its socket, TLS, the limits of connections, and how it stops."""

import asyncio
import contextlib
import errno
import logging
import math
import resource
import signal
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from typing import Any, cast

import msgspec
import psutil
import uvicorn
from starlette.applications import Starlette

from hyco_export.errors import ServerError
from hyco_export.server.connections import LimitedProtocol, PeerLimits, protocol_with
from hyco_export.server.engine import SETTLE_S

LOOPBACK = "127.0.0.1"
DRAIN_S = SETTLE_S + 3.0  # after the signal to stop; then connections are aborted: only slow readers are left
KEEP_ALIVE_S = 75  # a device drafts between two rounds, an emulated one for seconds
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
ACCEPT_TURNS = 3  # turns of the event loop in which connections beyond the limit are open before they are closed
SMALLEST_BACKLOG = 8  # where there are few descriptors
SPARE_DESCRIPTORS = 64  # files that a running server may open beside its connections
QUIET_S = 60.0  # between two log lines about the same error
_log = logging.getLogger(__name__)


def serve(
    app: Starlette,
    host: str = LOOPBACK,
    port: int = 0,
    on_ready: Callable[[str, int], None] = lambda _host, _port: None,
    tls: ssl.SSLContext | None = None,
    peers: PeerLimits | None = None,
) -> int:
    """Serve until SIGINT or SIGTERM; calls in flight have SETTLE_S to be finished. Port 0 picks a free one.

    Returns:
        Calls in flight that were not finished: refused or, where nobody read the answer, cut off.

    Args:
        on_ready: called with host and port once connections are accepted.
        tls: of `security.server_context`; None for plain HTTP.
        peers: what a connection may take.

    Raises:
        ServerError: the address cannot be bound.
    """
    listener = bind(host, port)
    bound_port = listener.getsockname()[1]
    limits = within_descriptors(peers or PeerLimits())
    server = AnnouncingServer(configure(app, tls, limits), lambda: on_ready(host, bound_port))
    with _stopping_is_normal():
        server.run(sockets=[listener])
    return server.unfinished


def configure(app: Starlette, tls: ssl.SSLContext | None = None, peers: PeerLimits | None = None) -> uvicorn.Config:
    """uvicorn's settings for this application."""
    limits = peers or PeerLimits()
    return uvicorn.Config(
        app,
        http=protocol_with(limits, tls),  # type: ignore[arg-type]  # called like the class it stands for
        loop="asyncio",  # whether uvloop is installed or not
        log_level="error",  # a warning for each bad request would let anybody fill the log
        access_log=False,
        server_header=False,
        proxy_headers=False,  # nothing here asks for the address of a caller
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=math.ceil(DRAIN_S) + 1,  # never reached: connections are aborted before
        lifespan="on",
        ws="none",
        backlog=limits.backlog,
    )


def within_descriptors(peers: PeerLimits) -> PeerLimits:
    """The limits, with fewer connections where the process may not open that many files. Its soft limit is raised as
    far as needed and allowed; where that is not enough, up to half of the descriptors are for connections that are
    being accepted or refused."""
    beside = psutil.Process().num_fds() + SPARE_DESCRIPTORS
    most = beside + ACCEPT_TURNS * peers.backlog + peers.connections
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < most:
        soft = most if hard == resource.RLIM_INFINITY else min(hard, most)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft == resource.RLIM_INFINITY or soft >= most:
        return peers
    backlog = min(peers.backlog, max(SMALLEST_BACKLOG, (soft - beside) // (2 * ACCEPT_TURNS)))
    fewer = min(peers.connections, max(1, soft - beside - ACCEPT_TURNS * backlog))
    _log.warning("%d connections at most, for this process may open %d files: raise ulimit -n", fewer, soft)
    return msgspec.structs.replace(peers, connections=fewer, backlog=backlog)


class AnnouncingServer(uvicorn.Server):
    """uvicorn's server that reports when it accepts connections, logs in one line why it cannot, and stops the
    application (`app.state.stop`, where it has one) before it waits for its connections to close.

    unfinished: calls in flight that were not finished when it stopped.
    """

    def __init__(self, config: uvicorn.Config, announce: Callable[[], None]) -> None:
        super().__init__(config)
        self._announce = announce
        self.unfinished = 0
        self._quiet_until_s = 0.0

    def _loop_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """asyncio would log every refused accept, thousands a second, each with its traceback."""
        error = context.get("exception")
        if not isinstance(error, OSError) or error.errno not in (errno.EMFILE, errno.ENFILE):
            loop.default_exception_handler(context)
        elif loop.time() > self._quiet_until_s:
            self._quiet_until_s = loop.time() + QUIET_S
            _log.error("a connection cannot be accepted: %s; raise ulimit -n", error.strerror)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        asyncio.get_running_loop().set_exception_handler(self._loop_error)
        await super().startup(sockets)
        if self.started:
            self._announce()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        stop = getattr(cast(Starlette, self.config.app).state, "stop", None)
        stopping = asyncio.ensure_future(stop()) if stop else None
        aborting = asyncio.get_running_loop().call_later(DRAIN_S, self._abort_connections)
        await super().shutdown(sockets)
        aborting.cancel()
        if stopping is not None:
            self.unfinished += await stopping

    def _abort_connections(self) -> None:
        for connection in list(cast("set[LimitedProtocol]", self.server_state.connections)):
            self.unfinished += connection.is_answering
            connection.transport.abort()


def bind(host: str, port: int) -> socket.socket:
    """A listening socket.

    Raises:
        ServerError: the address cannot be bound.
    """
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        found = socket.getaddrinfo(host or None, 0, family, socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][4]
        # the resolver understands the zone of a link-local address, but also takes numbers that are no port
        listener = socket.create_server((found[0], port, *found[2:]), family=family, backlog=PeerLimits().backlog)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ServerError(f"cannot listen on {host}:{port}: {reason}", "choose another --host or --port") from error
    # accepted connections inherit it; without it a reply's second packet waits 40 ms for a delayed acknowledgement
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


@contextlib.contextmanager
def _stopping_is_normal() -> Iterator[None]:
    """uvicorn raises the signal that stopped it again when it is done; `serve` ends by it without an error."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, lambda _number, _frame: None) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
