"""Calls of an OpenAI-compatible endpoint: sampling fields it may reject, waiting and repeating, errors in plain words.

The client repeats calls that were cut off, timed out, or answered with 408, 409, 429 or 5xx, and waits as long as a
`Retry-After` of up to two minutes says. The key is read from the environment, goes into the client alone, and is
struck out of every text that comes back.
"""

import os
import re
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit, urlunsplit

import httpx2
import msgspec
import openai

from hyco_export.errors import HycoError, first_line
from hyco_export.protocol.security import is_loopback

OPENAI_URL = "https://api.openai.com/v1"
KEY_VARIABLE = "OPENAI_API_KEY"
NO_KEY = "none"  # the client wants some text; servers that ask for no key ignore it
SAMPLING: Mapping[str, float | int] = {"temperature": 0.1, "top_p": 0.9, "seed": 42}  # the paper's, Appendix E
BAD_REQUEST = (400, 413, 422)
FILTERED = re.compile(r"content[_ ]filter|content management policy|content_policy_violation", re.IGNORECASE)
MESSAGE_CHARACTERS = 300  # of an endpoint's error text: enough to act on; some repeat the whole prompt
STRUCK_OUT = "[key]"
AGAIN = "run the command again: replies so far are kept, and it goes on behind them"

Message = Mapping[str, str]  # role and content


class Endpoint(msgspec.Struct, frozen=True):
    """Which model behind which URL; `key_variable` names the environment variable that holds the key.

    Raises:
        HycoError: a model without a name.
    """

    model: str
    base_url: str = OPENAI_URL
    key_variable: str = KEY_VARIABLE
    timeout_s: float = 120.0  # of one attempt
    retries: int = 5
    insecure: bool = False  # may the key go to another machine without TLS

    def __post_init__(self) -> None:
        if not self.model.strip():
            raise HycoError(f"the judge's model is {self.model!r}", "give its name, as the endpoint calls it")

    @property
    def place(self) -> str:
        """The URL without what may be secret in it: user, password, query."""
        parts = urlsplit(self.base_url)
        return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


class Reply(msgspec.Struct, frozen=True):
    """What came back of one request, or why nothing did.

    `text` is the raw reply, of a broken one the response's body; `problem` says why it cannot be a score, "" where it
    may be; `rejected` marks a request that the endpoint would not take, for a reason that may hold for all of them.
    """

    text: str
    problem: str = ""
    rejected: bool = False
    finish: str = ""
    tokens_in: int = 0
    tokens_out: int = 0
    attempts: int = 1
    request: Mapping[str, Any] = {}


class _Said(msgspec.Struct):
    content: str | None = None
    refusal: str | None = None


class _Choice(msgspec.Struct):
    message: _Said
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Completion(msgspec.Struct):
    choices: list[_Choice]
    usage: _Usage | None = None


class JudgeClient:
    """One endpoint for the length of a run; an asynchronous context manager.

    Args:
        endpoint: whom to ask.
        transport: for tests; None for the network.

    Raises:
        HycoError: a malformed URL, a key that is missing or would travel in the clear.
    """

    def __init__(self, endpoint: Endpoint, transport: httpx2.AsyncBaseTransport | None = None) -> None:
        self._endpoint = endpoint
        self._key = read_key(endpoint)
        self._rejected: set[str] = set()  # sampling fields that the endpoint does not take
        self._client = openai.AsyncOpenAI(
            api_key=self._key or NO_KEY,
            base_url=endpoint.base_url,
            timeout=endpoint.timeout_s,
            max_retries=endpoint.retries,
            http_client=openai.DefaultAsyncHttpxClient(transport=transport) if transport else None,
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._client.close()

    async def ask(self, messages: Sequence[Message]) -> Reply:
        """The reply to one request, without the sampling fields that the endpoint rejects.

        Raises:
            HycoError: the endpoint cannot be reached, takes no further calls, or knows neither key nor model.
        """
        left_out = set(self._rejected)
        while True:
            sampling = {name: value for name, value in SAMPLING.items() if name not in left_out}
            request: dict[str, Any] = {"model": self._endpoint.model, **sampling}
            try:
                create = self._client.chat.completions.with_raw_response.create
                answer = await create(**{"messages": messages, **request})
            except openai.APIStatusError as error:
                field = _rejected_field(error, sampling)
                if field is None:
                    return self._refused(error, request)
                left_out.add(field)
                continue
            except openai.APIConnectionError as error:
                raise self._unreachable(error) from error
            self._rejected |= left_out  # only now: without them it was taken
            return self._read(answer.text, answer.retries_taken + 1, request)

    def _read(self, body: str, attempts: int, request: Mapping[str, Any]) -> Reply:
        try:
            completion = msgspec.json.decode(body, type=_Completion)
            choice = completion.choices[0]
        except (msgspec.DecodeError, IndexError) as error:
            problem = f"malformed: no chat completion: {first_line(error)}"
            return Reply(self._struck(body), problem, attempts=attempts, request=request)
        said, usage, finish = choice.message, completion.usage or _Usage(), choice.finish_reason or ""
        problem = ""
        if said.refusal or finish == "content_filter":
            problem = "refused: by the judge" if said.refusal else "refused: by the endpoint's filter"
        elif not said.content:
            problem = f"malformed: an empty reply (finish reason {finish or 'none'})"
        text = self._struck(said.content or said.refusal or "")
        return Reply(text, problem, False, finish, usage.prompt_tokens, usage.completion_tokens, attempts, request)

    def _refused(self, error: openai.APIStatusError, request: Mapping[str, Any]) -> Reply:
        """The reply for a request that the endpoint refused for what is in it.

        Raises:
            HycoError: it was refused for another reason.
        """
        code, text = error.status_code, self._struck(_message(error))
        if code in BAD_REQUEST and FILTERED.search(f"{error.code} {text}"):
            return Reply(text, "refused: by the endpoint's filter", request=request)
        if code in BAD_REQUEST:
            return Reply(text, f"rejected: HTTP {code}: {text}", rejected=True, request=request)
        raise self._stopped(code, text) from error

    def _stopped(self, code: int, text: str) -> HycoError:
        place, model, variable = self._endpoint.place, self._endpoint.model, self._endpoint.key_variable
        if code in (401, 403):  # without the endpoint's text, which may hold a part of the key
            key = f"the key in {variable}" if self._key else f"a call without a key ({variable} is not set)"
            return HycoError(
                f"{place} does not accept {key} for {model} (HTTP {code})", f"put a valid key in {variable}"
            )
        if code == 404:
            message = f"{place} has no model {model!r}, or no chat completions (HTTP 404): {text}"
            return HycoError(message, "correct the judge's model or URL, which mostly ends in /v1")
        if code == 429:
            message = f"{place} takes no further calls (HTTP 429), after {self._endpoint.retries} retries: {text}"
            return HycoError(message, f"wait or raise the account's limit, lower --concurrency; then {AGAIN}")
        return HycoError(f"{place} answers with HTTP {code}: {text}", AGAIN)

    def _unreachable(self, error: openai.APIConnectionError) -> HycoError:
        endpoint = self._endpoint
        if isinstance(error, openai.APITimeoutError):
            message = f"{endpoint.place} did not answer within {endpoint.timeout_s:g} s, {endpoint.retries + 1} times"
            return HycoError(message, f"raise --timeout-s or lower --concurrency; then {AGAIN}")
        reason = self._struck(first_line(error.__cause__ or error))
        message = f"{endpoint.place} cannot be reached: {reason}"
        return HycoError(message, f"correct the judge's URL or start its server; then {AGAIN}")

    def _struck(self, text: str) -> str:
        return text.replace(self._key, STRUCK_OUT) if self._key else text


def read_key(endpoint: Endpoint) -> str:
    """The key, "" where there is none and the endpoint may do without.

    Raises:
        HycoError: a malformed URL, a key that is missing or would travel in the clear.
    """
    url = urlsplit(endpoint.base_url)
    if url.scheme not in ("http", "https") or not url.hostname:
        raise HycoError(f"the judge's URL {endpoint.place!r} is no http(s) URL", f"give one like {OPENAI_URL}")
    key = os.environ.get(endpoint.key_variable, "").strip()
    if not key and (endpoint.key_variable != KEY_VARIABLE or endpoint.base_url == OPENAI_URL):
        raise HycoError(
            f"no key in the environment variable {endpoint.key_variable}", f"export {endpoint.key_variable}"
        )
    if key and url.scheme == "http" and not is_loopback(url.hostname) and not endpoint.insecure:
        message = f"the key in {endpoint.key_variable} would go to {url.hostname} without TLS"
        raise HycoError(message, f"give an https URL, unset {endpoint.key_variable}, or say --insecure")
    return key


def _rejected_field(error: openai.APIStatusError, sent: Mapping[str, object]) -> str | None:
    """The sampling field that an endpoint names as its reason, if it does."""
    if error.status_code not in BAD_REQUEST or FILTERED.search(f"{error.code} {_message(error)}"):
        return None
    if error.param in sent:
        return error.param
    named = [name for name in sent if re.search(rf"\b{name}\b", _message(error))]
    return named[0] if named else None


def _message(error: openai.APIStatusError) -> str:
    """The endpoint's own words, on one line."""
    body = error.body
    found = body.get("message") or body.get("detail") if isinstance(body, Mapping) else None
    text = str(found or error.response.text or error.message)
    return " ".join(text.split())[:MESSAGE_CHARACTERS]
