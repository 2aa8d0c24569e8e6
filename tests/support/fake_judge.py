"""An OpenAI-compatible endpoint that answers what a test tells it to, with or without a network."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import httpx2
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

MODEL = "fake-judge"
Answer = tuple[int, Any, Mapping[str, str]]  # status, body, headers


def completion(content: str | None, finish: str = "stop", refusal: str | None = None) -> Answer:
    """A reply of 100 tokens in and 7 out."""
    message = {"role": "assistant", "content": content, "refusal": refusal}
    choice = {"index": 0, "finish_reason": finish, "message": message}
    return 200, {"choices": [choice], "usage": {"prompt_tokens": 100, "completion_tokens": 7}}, {}


def failure(status: int, message: str, headers: Mapping[str, str] | None = None, **more: Any) -> Answer:
    """An error in OpenAI's layout; `more`: `param`, `code`."""
    return status, {"error": {"message": message, "type": "error", **more}}, headers or {}


class FakeJudge:
    """Request i gets `answers[i]`, the last one again and again; or what a function makes of the request's body.

    Attributes:
        bodies: of every request, in order.
        headers: the same.
    """

    def __init__(self, answers: Sequence[Answer] | Callable[[dict[str, Any]], Answer]) -> None:
        self._answers = answers
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []

    @property
    def transport(self) -> httpx2.AsyncBaseTransport:
        """For a client in the same process."""

        async def handle(request: httpx2.Request) -> httpx2.Response:
            status, content, headers = self._answer(await request.aread(), request.headers)
            return httpx2.Response(status, content=content, headers=headers)

        return httpx2.MockTransport(handle)

    @property
    def app(self) -> Starlette:
        """For a server of its own."""

        async def handle(request: Request) -> Response:
            status, content, headers = self._answer(await request.body(), request.headers)
            return Response(content, status, headers)

        return Starlette(routes=[Route("/v1/chat/completions", handle, methods=["POST"])])

    def _answer(self, body: bytes, headers: Mapping[str, str]) -> tuple[int, bytes, dict[str, str]]:
        self.bodies.append(json.loads(body))
        self.headers.append({name.lower(): value for name, value in headers.items()})
        if callable(self._answers):
            status, content, own = self._answers(self.bodies[-1])
        else:
            status, content, own = self._answers[min(len(self.bodies), len(self._answers)) - 1]
        raw = content if isinstance(content, bytes) else json.dumps(content).encode()
        return status, raw, {"content-type": "application/json", **own}
