"""What a body of `POST /v1/chat/completions` asks for, in OpenAI's shape; what cannot be done is refused by name.

A parameter that would change the answer is never ignored: it is understood, or has the value that switches it off, or
is refused. Parameters that change no token (`user`, `metadata`, ...) are ignored.
"""

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from hyco_export.core.numerics import COLDEST, HOTTEST
from hyco_export.errors import ProtocolError
from hyco_export.protocol.refusals import shown
from hyco_export.protocol.wire import Sampling
from hyco_export.server.admission import SEED_LIMIT

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
MOST_STOPS, LONGEST_STOP = 4, 256  # strings, and characters of one
IGNORED = frozenset(
    ("metadata", "parallel_tool_calls", "prompt_cache_key", "safety_identifier", "service_tier", "store", "user")
)
# values that switch a parameter off; null does so for every one
NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "frequency_penalty": (0,),
    "function_call": ("none",),
    "functions": ([],),
    "logit_bias": ({},),
    "logprobs": (False,),
    "modalities": (["text"],),
    "n": (1,),
    "presence_penalty": (0,),
    "response_format": ({"type": "text"},),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
}
MOST_TOP_K = 2**31 - 1
PLAIN = frozenset(("role", "content"))  # of a message
EMPTY: tuple[object, ...] = (None, [], "")  # of what a client sends back with an earlier answer: `refusal`, ...

Stop = Annotated[str, Meta(min_length=1, max_length=LONGEST_STOP)]
Tokens = Annotated[int, Meta(ge=1)]


class ParameterError(ProtocolError):
    """A refusal that names the parameter of the call, as OpenAI's errors do; `status` where HTTP's is not 400."""

    def __init__(self, code: str, parameter: str, message: str, hint: str = "", status: int = 400) -> None:
        super().__init__(code, message, hint)
        self.parameter = parameter
        self.status = status


class StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool = False


class ChatRequest(msgspec.Struct, frozen=True):
    """The parameters that are understood. None: the server's own value. Messages are `conversation`'s to read."""

    model: str
    messages: Annotated[list[dict[str, Any]], Meta(min_length=1)]
    temperature: Annotated[float, Meta(ge=0, le=HOTTEST)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=0, le=MOST_TOP_K)] | None = None
    max_tokens: Tokens | None = None
    max_completion_tokens: Tokens | None = None
    stop: Stop | Annotated[list[Stop], Meta(max_length=MOST_STOPS)] = []
    seed: Annotated[int, Meta(ge=0)] | None = None
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def most_tokens(self) -> int | None:
        """The cap under its newer name or its older one."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def sampling(self, usual: Sampling) -> Sampling:
        """The sampling asked for; what is left open is `usual`'s.

        Raises:
            ParameterError: a temperature between 0 and the coldest.
        """
        asked = Sampling(
            usual.temperature if self.temperature is None else self.temperature,
            usual.top_k if self.top_k is None else self.top_k,
            usual.top_p if self.top_p is None else self.top_p,
        )
        if 0 < asked.temperature < COLDEST:
            seen = f"temperature is {asked.temperature}, it must be 0 or lie in [{COLDEST}, {HOTTEST}]"
            raise ParameterError("value_range", "temperature", seen)
        return asked

    def conversation(self) -> list[dict[str, str]]:
        """Role and text of every message.

        Raises:
            ParameterError: another role, content that is no text, or a field that a text cannot carry.
        """
        return [_turn(message, f"messages[{number}]") for number, message in enumerate(self.messages)]


def read_request(body: bytes) -> ChatRequest:
    """The call's parameters.

    Raises:
        ProtocolError: code malformed: no JSON object.
        ParameterError: the first parameter that is missing, wrong, or asks for what this server does not do.
    """
    try:
        given = msgspec.json.decode(body, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError("malformed", f"the body is not a JSON object: {error}") from error
    known = {name: value for name, value in given.items() if value is not None and name not in IGNORED}
    for name in known.keys() - ChatRequest.__struct_fields__:
        _require_neutral(name, known[name])
    try:
        request = msgspec.convert(known, ChatRequest)
    except msgspec.ValidationError as error:
        raise _refused(error) from error
    if request.max_tokens and request.max_completion_tokens and request.max_tokens != request.max_completion_tokens:
        seen = f"max_tokens is {request.max_tokens}, max_completion_tokens {request.max_completion_tokens}"
        raise ParameterError("value_range", "max_tokens", seen, "give one of them")
    if request.seed is not None and request.seed >= SEED_LIMIT:
        raise ParameterError("value_range", "seed", f"seed is {request.seed}, it must be below 2**64")
    return request


def _require_neutral(name: str, value: object) -> None:
    if name not in NEUTRAL:
        raise ParameterError("unsupported", name, f"{shown(name)} is not a parameter of this server", "leave it out")
    if not any(value == neutral and isinstance(value, bool) == isinstance(neutral, bool) for neutral in NEUTRAL[name]):
        neutral = msgspec.json.encode(NEUTRAL[name][0]).decode()
        raise ParameterError("unsupported", name, f"{name} is not supported: only {neutral} is", "leave it out")


def _refused(error: msgspec.ValidationError) -> ParameterError:
    """msgspec's words with the parameter's name: `Expected `int`, got `str` - at `$.seed``."""
    reason, _, place = str(error).partition(" - at `$.")
    name = place.rstrip("`")
    if not name:  # a field that is missing: `Object missing required field `model``
        name = reason.partition("field `")[2].rstrip("`")
    return ParameterError("value_range", name, f"{name}: {reason}")


def _turn(message: Mapping[str, Any], place: str) -> dict[str, str]:
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or role not in ROLES:
        seen = shown(role) if isinstance(role, str) else "no text"
        raise ParameterError("unsupported", f"{place}.role", f"role is {seen}", f"known ones: {', '.join(ROLES)}")
    for name in message.keys() - PLAIN:
        if message[name] not in EMPTY:
            raise ParameterError("unsupported", f"{place}.{name}", f"{shown(name)} cannot be passed on", "leave it out")
    if isinstance(content, list):
        content = "".join(_part(part, f"{place}.content[{number}]") for number, part in enumerate(content))
    if not isinstance(content, str):
        raise ParameterError("unsupported", f"{place}.content", "content must be a text, or a list of parts with text")
    return {"role": ROLES[role], "content": content}


def _part(part: object, place: str) -> str:
    if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    raise ParameterError("unsupported", place, "this part of the content is no text", "send parts of type text alone")
