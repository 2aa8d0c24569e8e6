"""The engine over HTTP: routes, limits on bodies, typed refusals, callers that disconnect.

protocol/PROTOCOL.md says what travels, docs/serving.md what chat clients send; `serving` runs the application as a
process.
"""

import asyncio
import contextlib
import logging
import math
import re
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from hyco_export.errors import HycoError, ProtocolError
from hyco_export.protocol import wire
from hyco_export.protocol.refusals import as_refusal, body_of, headers_of, shown, status_of
from hyco_export.protocol.security import ANYBODY, Tokens
from hyco_export.protocol.wire import HEADER, HEADER_DIGITS, pad
from hyco_export.server import metrics
from hyco_export.server.admission import shutting_down
from hyco_export.server.chat.completions import JSON, ChatModel, Completions, error_response
from hyco_export.server.connections import TRUSTED
from hyco_export.server.engine import Engine
from hyco_export.server.metrics import place_of

ID_BYTES = 5  # of a token id or a row in MessagePack, at most
ENVELOPE_BYTES = 1024  # of a body beside its ids
CALLS_PER_SESSION = 2  # waiting at once: a call, and a retry of it
SWEEP_S = 5.0  # between two searches for idle sessions
FRESH_S = 5.0  # for which the last pass, or the last failed probe, says enough of the model
LINGER_BYTES = 1 << 20  # of a body that is too large: read and dropped, so that its sender gets the refusal
MAX_LENGTH_DIGITS = 18
READY, FAILED = "ready\n", "the model failed when it was asked for a pass\n"
ROUND = re.compile(r"0|[1-9][0-9]{0,8}")

Answer = TypeVar("Answer")
Handler = Callable[[Request, str], Awaitable[Response]]  # a call and its caller
Shape = Callable[[ProtocolError], Response]  # of a refusal
_log = logging.getLogger(__name__)


class CallLimits(msgspec.Struct, frozen=True):
    """How long a call may keep the server waiting."""

    body_s: float = 30.0  # to send a body
    model_s: float = 10.0  # until a model that does not answer makes the server not ready


class Service:
    """The handlers of one engine.

    A PRIME waits for the engine on a thread of its own, so that the event loop stays free for health checks, metrics
    and refusals. A round waits on the loop itself: a thread would be woken twice a round.
    """

    def __init__(
        self,
        engine: Engine,
        info: wire.ServerInfo,
        tokens: Tokens,
        calls: CallLimits,
        pad_bytes: int,
        chat: ChatModel | None,
    ) -> None:
        self._engine = engine
        self._tokens = tokens
        self._body_s = calls.body_s
        self._model_s = calls.model_s
        self._pad_bytes = pad_bytes
        self._info = wire.encode(info)
        self._metrics = metrics.Metrics(lambda: engine.session_count, lambda: engine.prefilled)
        waiting = CALLS_PER_SESSION * engine.limits.sessions
        self._waiters = ThreadPoolExecutor(max_workers=waiting, thread_name_prefix="call")
        self._ready = False
        self._stopped: asyncio.Task[int] | None = None
        self._failed_until_s = -math.inf  # monotonic: until then a failed model is not asked again
        limits = engine.limits
        self._prime_bytes = ENVELOPE_BYTES + ID_BYTES * limits.prompt_limit
        self._verify_bytes = ENVELOPE_BYTES + 2 * ID_BYTES * limits.node_limit
        self._completions = Completions(engine, chat, self._metrics, self._work) if chat else None

    @contextlib.asynccontextmanager
    async def lifespan(self, _: Starlette) -> AsyncIterator[None]:
        """Ready while the application runs; frees every session after it."""
        sweeper = asyncio.create_task(self._sweep())
        self._ready = True
        try:
            yield
        finally:
            sweeper.cancel()
            await self.stop()
            self._waiters.shutdown(wait=True, cancel_futures=True)

    async def stop(self) -> int:
        """Refuse new calls and end those in flight; how many of them the engine gave up."""
        if self._stopped is None:
            self._ready = False
            self._stopped = asyncio.create_task(asyncio.to_thread(self._engine.shut_down))
        return await asyncio.shield(self._stopped)

    def guarded(self, handler: Handler, shape: Shape | None = None) -> Callable[[Request], Awaitable[Response]]:
        """An endpoint: a handler that is called for admitted callers only, and whose errors become refusals, of the
        protocol's shape or another one."""

        async def endpoint(request: Request) -> Response:
            try:
                return await handler(request, self._admit(request))
            except HycoError as error:
                return self._refusal(as_refusal(error), shape)
            except Exception as error:
                _log.error("a call failed: %s", place_of(error))
                return self._refusal(
                    ProtocolError("internal", f"the server failed: {type(error).__name__}", "try again"), shape
                )

        return endpoint

    def _admit(self, request: Request) -> str:
        """The caller.

        Raises:
            ProtocolError: codes malformed, origin, unauthorized.
        """
        if "content-length" in request.headers and "transfer-encoding" in request.headers:
            seen = "the head has a Content-Length and a Transfer-Encoding: proxies read two lengths out of it"
            raise UnreadBodyError("malformed", seen, "send one of them")
        if "origin" in request.headers:  # browsers send it with every POST, whatever address the page's name now has
            raise ProtocolError("origin", "this server takes no calls of web pages", "send no Origin header")
        owner = self._tokens.owner_of(request.headers.get("authorization"))
        if owner != ANYBODY:
            request.scope[TRUSTED] = True
        return owner

    async def prime(self, request: Request, owner: str) -> Response:
        body = await _read(request, self._prime_bytes, self._body_s)
        message = wire.decode(body, wire.PrimeRequest)
        async with _watched(request) as disconnected:
            reply = await self._work(self._engine.prime, message, disconnected, owner)
        request.scope[TRUSTED] = True
        self._metrics.primed(reply.server_ms)
        return self._message("prime", len(body), reply)

    async def verify(self, request: Request, owner: str) -> Response:
        body = await _read(request, self._verify_bytes, self._body_s)
        number = round_number(request.path_params["round"])
        message = wire.decode(body, wire.VerifyRequest)
        session = request.path_params["session"]
        self._require_ready()
        async with _watched(request) as disconnected:
            judged = self._engine.start_round(session, number, message, disconnected, owner)
            reply = await asyncio.shield(asyncio.wrap_future(judged))  # it is made even if nobody waits any more
        request.scope[TRUSTED] = True
        self._metrics.verified(len(reply.tokens), reply.server_ms)
        return self._message("verify", len(body), reply)

    async def close(self, request: Request, owner: str) -> Response:
        await self._work(self._engine.close, request.path_params["session"], owner)
        request.scope[TRUSTED] = owner != ANYBODY
        self._metrics.answered("close", 0, 0)
        return Response(status_code=204)

    def chat_routes(self) -> list[Route]:
        """The calls of chat clients; none where the server takes no chats."""
        completions = self._completions
        if completions is None:
            return []

        async def complete(request: Request, owner: str) -> Response:
            body = await _read(request, ENVELOPE_BYTES + completions.body_bytes, self._body_s, JSON)
            self._require_ready()
            async with _watched(request) as disconnected:
                response = await completions.complete(body, owner, disconnected)
            request.scope[TRUSTED] = True
            return response

        async def models(_: Request, __: str) -> Response:
            return completions.models()

        async def model(request: Request, _: str) -> Response:
            return completions.model(request.path_params["name"])

        return [
            Route("/v1/chat/completions", self.guarded(complete, error_response), methods=["POST"]),
            Route("/v1/models", self.guarded(models, error_response), methods=["GET"]),
            Route("/v1/models/{name:path}", self.guarded(model, error_response), methods=["GET"]),
        ]

    async def info(self, _: Request, __: str) -> Response:
        return self._reply("info", 0, self._info)

    async def expose(self, _: Request, __: str) -> Response:
        return Response(self._metrics.text(), media_type=metrics.CONTENT_TYPE)

    async def health(self, _: Request) -> Response:
        return Response("alive\n", media_type="text/plain")

    async def ready(self, _: Request) -> Response:
        """Readiness asks the model for a pass: one probe at a time, none while it answers other calls, and none for a
        while after a failed one, so that nobody can fill the log with its faults."""
        text = await self._model_state() if self._ready else "not ready\n"
        return Response(text, status_code=200 if text == READY else 503, media_type="text/plain")

    async def _model_state(self) -> str:
        if self._engine.passed_within(FRESH_S):
            return READY
        if time.monotonic() < self._failed_until_s:
            return FAILED
        try:
            async with asyncio.timeout(self._model_s):
                await asyncio.shield(asyncio.wrap_future(self._engine.probe()))
        except TimeoutError:
            return f"the model has not answered for {self._model_s:g} s\n"
        except Exception as error:
            if not isinstance(error, HycoError):  # the engine has not logged it
                _log.error("the model cannot be asked: %s", place_of(error))
            self._failed_until_s = time.monotonic() + FRESH_S
            return FAILED
        return READY

    async def refuse_route(self, _: Request, error: Exception) -> Response:
        """What the router itself refuses."""
        assert isinstance(error, HTTPException)
        known = {404: ("unknown_route", "no such call"), 405: ("method", "this path takes another method")}
        code, message = known.get(error.status_code, ("malformed", "the request cannot be understood"))
        response = self._refusal(ProtocolError(code, message, "see PROTOCOL.md for the calls"))
        response.headers.update(error.headers or {})  # Allow
        return response

    def _refusal(self, refusal: ProtocolError, shape: Shape | None = None) -> Response:
        self._metrics.refused(refusal.code)
        response = (shape or _refusal_message)(refusal)
        if isinstance(refusal, UnreadBodyError):
            response.headers["Connection"] = "close"
        return response

    def _message(self, call: str, bytes_up: int, reply: msgspec.Struct) -> Response:
        """A reply whose size would tell how much was committed: padded, where the server pads."""
        body = wire.encode(reply)
        if not self._pad_bytes:
            return self._reply(call, bytes_up, body)
        response = self._reply(call, bytes_up, pad(body, self._pad_bytes))
        padding_bytes = len(response.body) - len(body)
        self._metrics.padded(padding_bytes)
        response.headers[HEADER] = f"{padding_bytes:0{HEADER_DIGITS}}"
        return response

    def _reply(self, call: str, bytes_up: int, body: bytes) -> Response:
        self._metrics.answered(call, bytes_up, len(body))
        return Response(body, media_type=wire.MEDIA_TYPE)

    async def _work(self, task: Callable[..., Answer], *arguments: object) -> Answer:
        """Run a blocking call of the engine on a thread of its own."""
        self._require_ready()
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._waiters, task, *arguments)

    def _require_ready(self) -> None:
        if not self._ready:
            raise shutting_down("the server is stopping")

    async def _sweep(self) -> None:
        """Free idle sessions even when nobody calls."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(SWEEP_S)
            expired = await loop.run_in_executor(self._waiters, self._engine.expire)
            if expired:
                _log.info("%d idle sessions expired", expired)


def create_app(
    engine: Engine,
    info: wire.ServerInfo,
    tokens: Tokens | None = None,
    calls: CallLimits | None = None,
    pad_bytes: int = 0,
    chat: ChatModel | None = None,
) -> Starlette:
    """The ASGI application of an engine; without tokens everybody may call.

    `pad_bytes` > 0 pads the replies of PRIME and VERIFY to multiples of it (`wire.pad`). With `chat` it also takes the
    calls of chat clients.
    """
    service = Service(engine, info, tokens or Tokens(), calls or CallLimits(), pad_bytes, chat)
    routes = [
        Route("/v1/sessions", service.guarded(service.prime), methods=["POST"]),
        Route("/v1/sessions/{session}/rounds/{round}", service.guarded(service.verify), methods=["POST"]),
        Route("/v1/sessions/{session}", service.guarded(service.close), methods=["DELETE"]),
        *service.chat_routes(),
        Route("/v1/info", service.guarded(service.info), methods=["GET"]),
        Route("/metrics", service.guarded(service.expose), methods=["GET"]),
        Route("/healthz", service.health, methods=["GET"]),
        Route("/readyz", service.ready, methods=["GET"]),
    ]
    app = Starlette(routes=routes, exception_handlers={HTTPException: service.refuse_route}, lifespan=service.lifespan)
    app.router.redirect_slashes = False  # a path is right or unknown
    app.state.stop = service.stop
    return app


class UnreadBodyError(ProtocolError):
    """A refusal of a request that has not been read to its end: the connection is closed after it."""


def _refusal_message(refusal: ProtocolError) -> Response:
    return Response(
        wire.encode(body_of(refusal)),
        status_code=status_of(refusal),
        headers=headers_of(refusal),
        media_type=wire.MEDIA_TYPE,
    )


@contextlib.asynccontextmanager
async def _watched(request: Request) -> AsyncIterator[Callable[[], bool]]:
    """Tells whether the caller of a request, whose body has been read, has disconnected since."""
    disconnected = threading.Event()

    async def watch() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        disconnected.set()

    watcher = asyncio.create_task(watch())
    try:
        yield disconnected.is_set
    finally:
        watcher.cancel()


async def _read(request: Request, limit_bytes: int, limit_s: float, media_type: str = wire.MEDIA_TYPE) -> bytes:
    """The request's body, never more than the limit.

    Raises:
        ProtocolError: codes media_type, body_size, slow, malformed.
    """
    try:
        async with asyncio.timeout(limit_s):
            body = await _read_body(request, limit_bytes)
    except TimeoutError as error:
        raise UnreadBodyError("slow", f"the body took longer than {limit_s:g} s", "send it on a better link") from error
    except ClientDisconnect as error:
        raise ProtocolError("malformed", "the connection ended before the body did") from error
    _check_media_type(request, media_type)
    return body


def _check_media_type(request: Request, wanted: str) -> None:
    """A web page can make a browser send plain text to any server, but not this type."""
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    hint = f"send Content-Type: {wanted} and no Content-Encoding"
    if media_type != wanted:
        raise ProtocolError("media_type", f"the body is said to be {shown(media_type)}", hint)
    if "content-encoding" in request.headers:
        raise ProtocolError("media_type", "the body has a Content-Encoding, which no body here has", hint)


async def _read_body(request: Request, limit_bytes: int) -> bytes:
    message = f"the body is larger than the {limit_bytes} B this call takes"
    declared = request.headers.get("content-length", "0")
    if declared.isdecimal() and (len(declared) > MAX_LENGTH_DIGITS or int(declared) > limit_bytes + LINGER_BYTES):
        raise UnreadBodyError("body_size", message)
    body = bytearray()
    dropped_bytes = 0
    async for chunk in request.stream():
        if len(body) + len(chunk) <= limit_bytes and not dropped_bytes:
            body += chunk
            continue
        dropped_bytes += len(chunk)
        if dropped_bytes > LINGER_BYTES:
            raise UnreadBodyError("body_size", message)
    if dropped_bytes:
        raise ProtocolError("body_size", message)
    return bytes(body)


def round_number(text: str) -> int:
    """The round in a path.

    Raises:
        ProtocolError: code malformed.
    """
    if not ROUND.fullmatch(text):  # 01 is another path than 1
        raise ProtocolError("malformed", "the round in the path is not a number of at most 9 digits, the first no zero")
    return int(text)
