"""The application as a process: its socket, TLS, the limits of connections, and how it stops. Knows no routes."""

import contextlib
import signal
import socket
import ssl
import threading
from collections.abc import Callable, Iterator

import uvicorn
from starlette.applications import Starlette

from hyco_export.errors import ServerError
from hyco_export.runtime.guard.slow_peers import PeerLimits, protocol_with

LOOPBACK = "127.0.0.1"
DRAIN_S = 10  # for calls in flight when the server is told to stop
KEEP_ALIVE_S = 75  # a device may draft for a while between two rounds; an emulated one for seconds
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def serve(
    app: Starlette,
    host: str = LOOPBACK,
    port: int = 0,
    on_ready: Callable[[str, int], None] = lambda _host, _port: None,
    tls: ssl.SSLContext | None = None,
    peers: PeerLimits | None = None,
) -> None:
    """Serve until SIGINT or SIGTERM; calls in flight are finished first. Port 0 picks a free one.

    Args:
        on_ready: called with host and port once connections are accepted.
        tls: of `guard.tls.server_context`; None for plain HTTP.
        peers: what a connection may take.

    Raises:
        ServerError: the address cannot be bound.
    """
    listener = bind(host, port)
    bound_port = listener.getsockname()[1]
    server = AnnouncingServer(configure(app, tls, peers), lambda: on_ready(host, bound_port))
    with _stopping_is_normal():
        server.run(sockets=[listener])


def configure(app: Starlette, tls: ssl.SSLContext | None = None, peers: PeerLimits | None = None) -> uvicorn.Config:
    """uvicorn's settings for this application."""
    limits = peers or PeerLimits()
    return uvicorn.Config(
        app,
        http=protocol_with(limits),  # type: ignore[arg-type]  # called like the class it stands for
        loop="asyncio",  # whether uvloop is installed or not
        h11_max_incomplete_event_size=limits.head_bytes,
        log_level="error",  # a warning for each bad request would let anybody fill the log
        access_log=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=DRAIN_S,
        lifespan="on",
        ws="none",
        ssl_context_factory=(lambda _config, _default: tls) if tls else None,
    )


class AnnouncingServer(uvicorn.Server):
    """uvicorn's server that says when it accepts connections."""

    def __init__(self, config: uvicorn.Config, announce: Callable[[], None]) -> None:
        super().__init__(config)
        self._announce = announce

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._announce()


def bind(host: str, port: int) -> socket.socket:
    """A listening socket.

    Raises:
        ServerError: the address cannot be bound.
    """
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        found = socket.getaddrinfo(host or None, 0, family, socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][4]
        # the resolver knows the zone of a link's address, and takes any number for a port
        listener = socket.create_server((found[0], port, *found[2:]), family=family, backlog=128)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ServerError(f"cannot listen on {host}:{port}: {reason}", "choose another --host or --port") from error
    # accepted connections inherit it; without it a reply's second packet waits 40 ms for a delayed acknowledgement
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


@contextlib.contextmanager
def _stopping_is_normal() -> Iterator[None]:
    """uvicorn raises the signal that stopped it once more when it is done; here a stop is how `serve` ends."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, lambda _number, _frame: None) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
