"""The engine over HTTP: routes, limits before allocation, typed refusals, callers that go away.

Knows HTTP and the wire format, no models. PROTOCOL.md tells what travels.
"""

import asyncio
import contextlib
import logging
import signal
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from hyco_export.errors import HycoError, ProtocolError, ServerError
from hyco_export.runtime import metrics, wire
from hyco_export.runtime.engine import Engine
from hyco_export.runtime.refusals import as_refusal, body_of, status_of

LOOPBACK = "127.0.0.1"
ID_BYTES = 5  # of a token id or a row in MessagePack, at most
ENVELOPE_BYTES = 1024  # of a body beside its ids
CALLS_PER_SESSION = 2  # waiting at once: a call, and a retry of it
SWEEP_S = 5.0  # between two looks for idle sessions
DRAIN_S = 10  # for calls in flight when the server is told to stop
KEEP_ALIVE_S = 75  # a device may draft for a while between two rounds; an emulated one for seconds
MAX_ROUND_DIGITS = 9
MAX_LENGTH_DIGITS = 18
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)

Answer = TypeVar("Answer")
_log = logging.getLogger(__name__)


class Service:
    """The handlers of one engine.

    Calls wait for the engine on threads of their own, so that the loop stays free for health checks, metrics and
    refusals.
    """

    def __init__(self, engine: Engine, info: wire.ServerInfo) -> None:
        self._engine = engine
        self._info = wire.encode(info)
        self._metrics = metrics.Metrics(lambda: engine.session_count)
        calls = CALLS_PER_SESSION * engine.limits.sessions
        self._waiters = ThreadPoolExecutor(max_workers=calls, thread_name_prefix="call")
        self._ready = False
        limits = engine.limits
        self._prime_bytes = ENVELOPE_BYTES + ID_BYTES * limits.prompt_limit
        self._verify_bytes = ENVELOPE_BYTES + 2 * ID_BYTES * limits.node_limit

    @contextlib.asynccontextmanager
    async def lifespan(self, _: Starlette) -> AsyncIterator[None]:
        """Ready while the application runs; frees every session after it."""
        sweeper = asyncio.create_task(self._sweep())
        self._ready = True
        try:
            yield
        finally:
            self._ready = False
            sweeper.cancel()
            self._waiters.shutdown(wait=True, cancel_futures=True)
            self._engine.shut_down()

    async def prime(self, request: Request) -> Response:
        body = await _read(request, self._prime_bytes)
        message = wire.decode(body, wire.PrimeRequest)
        async with _watched(request) as gone:
            reply = await self._work(self._engine.prime, message, gone)
        self._metrics.primed(reply.server_ms)
        return self._reply("prime", len(body), wire.encode(reply))

    async def verify(self, request: Request) -> Response:
        body = await _read(request, self._verify_bytes)
        round_number = _round_number(request.path_params["round"])
        message = wire.decode(body, wire.VerifyRequest)
        async with _watched(request) as gone:
            reply = await self._work(self._engine.verify, request.path_params["session"], round_number, message, gone)
        self._metrics.verified(len(reply.tokens), reply.server_ms)
        return self._reply("verify", len(body), wire.encode(reply))

    async def close(self, request: Request) -> Response:
        await self._work(self._engine.close, request.path_params["session"])
        self._metrics.answered("close", 0, 0)
        return Response(status_code=204)

    async def info(self, _: Request) -> Response:
        return self._reply("info", 0, self._info)

    async def health(self, _: Request) -> Response:
        return Response("alive\n", media_type="text/plain")

    async def ready(self, _: Request) -> Response:
        text, status = ("ready\n", 200) if self._ready else ("not ready\n", 503)
        return Response(text, status_code=status, media_type="text/plain")

    async def expose(self, _: Request) -> Response:
        return Response(self._metrics.text(), media_type=metrics.CONTENT_TYPE)

    async def refuse(self, _: Request, error: Exception) -> Response:
        """A refusal as its status and body."""
        assert isinstance(error, HycoError)
        return self._refusal(as_refusal(error))

    async def refuse_route(self, _: Request, error: Exception) -> Response:
        """What the router itself refuses."""
        assert isinstance(error, HTTPException)
        known = {404: ("unknown_route", "no such call"), 405: ("method", "this path takes another method")}
        code, message = known.get(error.status_code, ("malformed", "the request cannot be understood"))
        return self._refusal(ProtocolError(code, message, "see PROTOCOL.md for the calls"))

    async def refuse_fault(self, _: Request, error: Exception) -> Response:
        """A fault of the server itself; the traceback is logged by the server that runs this application."""
        return self._refusal(ProtocolError("internal", f"the server failed: {type(error).__name__}", "try again"))

    def _refusal(self, refusal: ProtocolError) -> Response:
        self._metrics.refused(refusal.code)
        return Response(wire.encode(body_of(refusal)), status_code=status_of(refusal), media_type=wire.MEDIA_TYPE)

    def _reply(self, call: str, bytes_up: int, body: bytes) -> Response:
        self._metrics.answered(call, bytes_up, len(body))
        return Response(body, media_type=wire.MEDIA_TYPE)

    async def _work(self, task: Callable[..., Answer], *arguments: object) -> Answer:
        """Wait on a thread of its own until the engine has answered."""
        if not self._ready:
            raise ProtocolError("shutting_down", "the server is stopping", "try another server")
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._waiters, task, *arguments)

    async def _sweep(self) -> None:
        """Free idle sessions even when nobody calls."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(SWEEP_S)
            expired = await loop.run_in_executor(self._waiters, self._engine.expire)
            if expired:
                _log.info("%d idle sessions expired", expired)


def create_app(engine: Engine, info: wire.ServerInfo) -> Starlette:
    """The ASGI application of an engine."""
    service = Service(engine, info)
    routes = [
        Route("/v1/sessions", service.prime, methods=["POST"]),
        Route("/v1/sessions/{session}/rounds/{round}", service.verify, methods=["POST"]),
        Route("/v1/sessions/{session}", service.close, methods=["DELETE"]),
        Route("/v1/info", service.info, methods=["GET"]),
        Route("/healthz", service.health, methods=["GET"]),
        Route("/readyz", service.ready, methods=["GET"]),
        Route("/metrics", service.expose, methods=["GET"]),
    ]
    handlers: dict[type[Exception], Callable[[Request, Exception], Awaitable[Response]]] = {
        HycoError: service.refuse,
        HTTPException: service.refuse_route,
        Exception: service.refuse_fault,
    }
    return Starlette(routes=routes, exception_handlers=handlers, lifespan=service.lifespan)


def serve(
    app: Starlette,
    host: str = LOOPBACK,
    port: int = 0,
    on_ready: Callable[[str, int], None] = lambda _host, _port: None,
) -> None:
    """Serve until SIGINT or SIGTERM; calls in flight are finished first. Port 0 picks a free one.

    Args:
        on_ready: called with host and port once connections are accepted.

    Raises:
        ServerError: the address cannot be bound.
    """
    listener = _bind(host, port)
    bound_port = listener.getsockname()[1]
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=DRAIN_S,
        lifespan="on",
        ws="none",
    )
    with _stopping_is_normal():
        _AnnouncingServer(config, lambda: on_ready(host, bound_port)).run(sockets=[listener])


class _AnnouncingServer(uvicorn.Server):
    """uvicorn's server that says when it accepts connections."""

    def __init__(self, config: uvicorn.Config, announce: Callable[[], None]) -> None:
        super().__init__(config)
        self._announce = announce

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._announce()


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


def _bind(host: str, port: int) -> socket.socket:
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, port), family=family, backlog=128)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ServerError(f"cannot listen on {host}:{port}: {reason}", "choose another --host or --port") from error
    # accepted connections inherit it; without it a reply's second packet waits 40 ms for a delayed acknowledgement
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


@contextlib.asynccontextmanager
async def _watched(request: Request) -> AsyncIterator[Callable[[], bool]]:
    """Tells whether the caller of a request whose body has been read has gone away meanwhile."""
    gone = threading.Event()

    async def watch() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        gone.set()

    watcher = asyncio.create_task(watch())
    try:
        yield gone.is_set
    finally:
        watcher.cancel()


async def _read(request: Request, limit_bytes: int) -> bytes:
    """The request's body, never more than the limit.

    Raises:
        ProtocolError: codes body_size, malformed.
    """
    too_large = ProtocolError("body_size", f"the body is larger than the {limit_bytes} B this call takes")
    declared = request.headers.get("content-length", "0")
    if declared.isdecimal() and (len(declared) > MAX_LENGTH_DIGITS or int(declared) > limit_bytes):
        raise too_large
    body = bytearray()
    try:
        async for chunk in request.stream():
            body += chunk
            if len(body) > limit_bytes:
                raise too_large
    except ClientDisconnect as error:
        raise ProtocolError("malformed", "the connection ended before the body did") from error
    return bytes(body)


def _round_number(text: str) -> int:
    """The round in a path.

    Raises:
        ProtocolError: code malformed.
    """
    if not (text.isascii() and text.isdecimal() and len(text) <= MAX_ROUND_DIGITS):
        raise ProtocolError("malformed", "the round in the path is not a number of at most 9 digits")
    return int(text)
