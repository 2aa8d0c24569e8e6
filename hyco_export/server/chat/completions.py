"""`POST /v1/chat/completions` and `GET /v1/models` in OpenAI's shape: the server drafts for itself with its own head.

A completion is a session with draft side "server" and the exact rule, as any client could open one (`generation`).
docs/serving.md describes the calls.
"""

import secrets
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any

import msgspec
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from hyco_export.core.data.detokeniser import Detokeniser
from hyco_export.errors import HycoError, ProtocolError
from hyco_export.protocol import wire
from hyco_export.protocol.refusals import as_refusal, headers_of, shown, status_of
from hyco_export.server.admission import PRIME_AGAIN
from hyco_export.server.chat.answer_text import ChatText, StopStrings
from hyco_export.server.chat.chat_request import ChatRequest, ParameterError, read_request
from hyco_export.server.chat.generation import Generation, Usage, Work
from hyco_export.server.engine import Engine
from hyco_export.server.metrics import Metrics
from hyco_export.server.sessions import Cancelled

JSON = "application/json"
EVENTS = "text/event-stream"
DEFAULT_TOKENS = 1024  # of an answer whose caller sets no cap: memory for all of them is reserved
SEED_BITS = 63
TEXT_BYTES_PER_ID = 16  # of a body: 4 to 5 are usual, and escapes in JSON make up to three of one
DONE = b"data: [DONE]\n\n"
PARAMETER_OF = {"prompt_size": "messages", "token_range": "messages", "cache_size": "max_tokens"}  # by refusal code
CALL_AGAIN = "send the call again"  # what a chat client can do where a device primes again
AS_BAD_REQUEST = (413, 422)  # OpenAI's errors know one status for what a parameter gets wrong


class ChatModel(msgspec.Struct, frozen=True):
    """The model as chat clients know it.

    text: its template and tokenizer; None without a template, and `refusal` says why.
    """

    name: str
    text: ChatText | None
    sampling: wire.Sampling  # of calls that do not set their own
    refusal: str = ""


class Answer:
    """A generation as text: pieces that are certain, then why it ended.

    finish_reason: "stop" (a stop token or a stop string) or "length", once the pieces have ended.
    """

    def __init__(self, generation: Generation, text: ChatText, stops: tuple[str, ...]) -> None:
        self.generation = generation
        self.finish_reason = ""
        self._detokeniser = Detokeniser(text.decode)
        self._stops = StopStrings(stops)

    async def pieces(self) -> AsyncIterator[str]:
        """Texts that make the answer, none empty.

        Raises:
            ProtocolError: as `Generation.pieces`.
        """
        async for tokens, finished in self.generation.pieces():
            said = tokens[:-1] if finished == "stop" else tokens  # the stop token is none of the answer
            text = self._stops.push(self._detokeniser.push(said))
            if finished:
                text += self._stops.push(self._detokeniser.end())
                text += self._stops.end()
            if text:
                yield text
            self.finish_reason = "stop" if self._stops.found else finished
            if self.finish_reason:
                return


class Completions:
    """The calls of chat clients.

    Args:
        engine: opens sessions and makes rounds.
        model: what they talk to.
        metrics: the server's.
        work: runs a blocking call on a thread of its own.
    """

    def __init__(self, engine: Engine, model: ChatModel, metrics: Metrics, work: Work) -> None:
        self.body_bytes = TEXT_BYTES_PER_ID * engine.limits.prompt_limit
        self._engine, self._model, self._metrics, self._work = engine, model, metrics, work
        self._started_s = int(time.time())

    async def complete(self, body: bytes, owner: str, cancelled: Cancelled) -> Response:
        """The answer to a call: whole, or as a stream that begins when the prompt has been processed.

        Raises:
            ProtocolError: what `read_request` and the engine refuse; ParameterError where a parameter is to blame.
        """
        request = read_request(body)
        self._require_model(request.model)
        text = self._require_text()
        generation = Generation(
            self._engine, self._metrics, self._work, await self._primed(request, text), owner, cancelled
        )
        envelope = Envelope(f"chatcmpl-{secrets.token_hex(12)}", self._model.name)
        answer = Answer(generation, text, request.stops)
        streams = False
        try:
            try:
                await generation.open()
            except ProtocolError as refusal:
                raise _named(refusal) from refusal
            if request.stream:
                streams = True
                usage = request.stream_options.include_usage
                return _Events(self._events(answer, envelope, usage, len(body)), generation)
            whole = "".join([piece async for piece in answer.pieces()])
        finally:
            if not streams:
                generation.close()
        reply = envelope.whole(whole, answer.finish_reason, generation.usage)
        self._metrics.answered("chat", len(body), len(reply))
        return Response(reply, media_type=JSON)

    def models(self) -> Response:
        """The list of models: one."""
        return Response(msgspec.json.encode({"object": "list", "data": [self._shown()]}), media_type=JSON)

    def model(self, name: str) -> Response:
        """One model by its name.

        Raises:
            ParameterError: code model_not_found.
        """
        self._require_model(name)
        return Response(msgspec.json.encode(self._shown()), media_type=JSON)

    def _shown(self) -> dict[str, object]:
        return {"id": self._model.name, "object": "model", "created": self._started_s, "owned_by": "hyco-export"}

    def _require_model(self, name: str) -> None:
        if name != self._model.name:
            message = f"model {shown(name)} is not served here"
            raise ParameterError("model_not_found", "model", message, f"this server has {self._model.name}", 404)

    def _require_text(self) -> ChatText:
        if self._model.text is None:
            raise ParameterError("unsupported", "messages", f"this server takes no chats: {self._model.refusal}")
        return self._model.text

    async def _primed(self, request: ChatRequest, text: ChatText) -> wire.PrimeRequest:
        """The session to open; the template is applied on a thread of its own."""
        try:
            ids = await self._work(text.encode, request.conversation())
        except ProtocolError as refusal:
            raise (refusal if isinstance(refusal, ParameterError) else _named(refusal, "messages")) from refusal
        facts = self._engine.facts
        return wire.PrimeRequest(
            version=wire.PROTOCOL_VERSION,
            prompt=ids,
            sampling=request.sampling(self._model.sampling),
            acceptance=wire.EXACT,
            seed=secrets.randbits(SEED_BITS) if request.seed is None else request.seed,
            max_new_tokens=self._cap(request, len(ids)),
            draft_side="server" if facts.server_steps else "device",  # without a head: one token a round
            draft_steps=facts.server_steps,
            head_digest="",
        )

    def _cap(self, request: ChatRequest, prompt: int) -> int:
        """Tokens of the answer at most."""
        room = self._engine.facts.context_limit - prompt
        if request.most_tokens is None:
            return max(1, min(DEFAULT_TOKENS, room))
        if prompt <= self._engine.limits.prompt_limit and request.most_tokens > room:
            name = "max_tokens" if request.max_completion_tokens is None else "max_completion_tokens"
            seen = f"{name} is {request.most_tokens}; behind the {prompt} tokens of the prompt there is room for {room}"
            raise ParameterError("value_range", name, seen, "ask for fewer tokens or shorten the messages")
        return request.most_tokens

    async def _events(
        self, answer: Answer, envelope: "Envelope", include_usage: bool, bytes_up: int
    ) -> AsyncIterator[bytes]:
        """The stream of a completion; a failure in the middle of it is its last event."""
        bytes_down = 0
        try:
            async for event in _chunks(answer, envelope, include_usage):
                bytes_down += len(event)
                yield event
        except HycoError as error:
            refusal = as_refusal(error)
            self._metrics.refused(refusal.code)
            yield _event(error_of(refusal))
            return
        self._metrics.answered("chat", bytes_up, bytes_down)


async def _chunks(answer: Answer, envelope: "Envelope", include_usage: bool) -> AsyncIterator[bytes]:
    yield envelope.chunk({"role": "assistant", "content": ""}, None, include_usage)
    async for piece in answer.pieces():
        yield envelope.chunk({"content": piece}, None, include_usage)
    yield envelope.chunk({}, answer.finish_reason, include_usage)
    if include_usage:
        yield envelope.totals(answer.generation.usage)
    yield DONE


class Envelope(msgspec.Struct, frozen=True):
    """What stands around every part of one completion."""

    id: str
    model: str
    created: int = msgspec.field(default_factory=lambda: int(time.time()))

    def whole(self, text: str, finish_reason: str, usage: Usage) -> bytes:
        message = {"role": "assistant", "content": text, "refusal": None}
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": finish_reason}
        return msgspec.json.encode(self._head("chat.completion") | {"choices": [choice], "usage": usage})

    def chunk(self, delta: Mapping[str, str], finish_reason: str | None, include_usage: bool) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        usage = {"usage": None} if include_usage else {}
        return _event(self._head("chat.completion.chunk") | {"choices": [choice]} | usage)

    def totals(self, usage: Usage) -> bytes:
        return _event(self._head("chat.completion.chunk") | {"choices": [], "usage": usage})

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}


class _Events(StreamingResponse):
    """A stream of events; the generation behind it ends with it, also where the client goes away before its first."""

    def __init__(self, events: AsyncIterator[bytes], generation: Generation) -> None:
        super().__init__(events, media_type=EVENTS, headers={"Cache-Control": "no-cache"})
        self._generation = generation

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._generation.close()


def _event(value: object) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


def _named(refusal: ProtocolError, parameter: str = "") -> ProtocolError:
    """A refusal of the engine with the parameter that is to blame; itself where none is."""
    parameter = parameter or PARAMETER_OF.get(refusal.code, "")
    return ParameterError(refusal.code, parameter, refusal.message, refusal.hint) if parameter else refusal


def error_of(refusal: ProtocolError) -> dict[str, object]:
    """A refusal as the body of an OpenAI error."""
    kind = "invalid_request_error" if _status(refusal) < 500 else "server_error"
    parameter = refusal.parameter if isinstance(refusal, ParameterError) else None
    message = str(refusal).replace(PRIME_AGAIN, CALL_AGAIN)
    return {"error": {"message": message, "type": kind, "param": parameter, "code": refusal.code}}


def error_response(refusal: ProtocolError) -> Response:
    """A refusal as chat clients read it."""
    return Response(
        msgspec.json.encode(error_of(refusal)),
        status_code=_status(refusal),
        headers=headers_of(refusal),
        media_type=JSON,
    )


def _status(refusal: ProtocolError) -> int:
    if isinstance(refusal, ParameterError):
        return refusal.status
    status = status_of(refusal)
    return 400 if status in AS_BAD_REQUEST and refusal.code != "body_size" else status
