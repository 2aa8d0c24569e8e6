"""The fuzzer of chat calls: mutated JSON bodies against a real HTTP server.

Run: `make fuzz` (10,000 bodies). It fails on a 5xx, an answer that is neither a completion nor an OpenAI error, a
session left behind, or memory that grows.
"""

import argparse
import copy
import http.client
import json
import time
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from hyco_export.server.engine import Engine
from hyco_export.server.http import create_app
from tests.endurance.fuzz import FACTS, INFO, LIMITS, MODEL, Finding, Memory, show
from tests.endurance.mutation import INTEGERS
from tests.support.live_server import running
from tests.support.scripted import ScriptedSession
from tests.support.toy_chat import CHAT, NAME

SETTLE_S = 10.0
JSON = {"Content-Type": "application/json"}
VALUES = (
    *INTEGERS, None, True, False, "", "user", "\x00", "é" * 40, "\ud800", 0.5, -0.0, 1e308, 1e-9, [], {}, [[]], ["a"],
    [{"type": "text", "text": "c"}], {"type": "text"}, [{}], {"include_usage": True},
)  # fmt: skip
NAMES = (
    "model", "messages", "temperature", "top_p", "top_k", "max_tokens", "max_completion_tokens", "stop", "seed", "n",
    "stream", "stream_options", "logprobs", "tools", "response_format", "user", "unheard_of",
)  # fmt: skip


def body(dice: np.random.Generator) -> bytes:
    """A right call, with a parameter or a part of a turn made wrong at times, or bytes of it."""
    call: dict[str, Any] = {
        "model": NAME,
        "messages": [{"role": "user", "content": "cdefgh"}, {"role": "assistant", "content": "ab"}],
        "max_tokens": int(dice.integers(1, 20)),
        "stream": bool(dice.random() < 0.5),
        "stop": ["ab", "c"],
        "seed": int(dice.integers(1 << 40)),
    }
    for _ in range(int(dice.integers(0, 3))):
        value = copy.deepcopy(VALUES[int(dice.integers(len(VALUES)))])
        turns = call.get("messages")
        if dice.random() < 0.3 and isinstance(turns, list) and turns and isinstance(turns[0], dict):
            turns[0][str(dice.choice(["role", "content", "name", "tool_calls"]))] = value
        else:
            call[str(dice.choice(NAMES))] = value
    content = bytearray(json.dumps(call).encode())
    if dice.random() < 0.2:
        for place in dice.integers(0, len(content), int(dice.integers(1, 4))):
            content[int(place)] = int(dice.integers(256))
    return bytes(content[: int(dice.integers(len(content)))] if dice.random() < 0.05 else content)


def fuzz_chat(bodies: int, seed: int) -> Finding:
    """Bodies over a socket to a server in this process.

    Raises:
        AssertionError: a fault of the server's own; it names the body.
    """
    engine = Engine(lambda: ScriptedSession(MODEL), FACTS, LIMITS)
    dice, found, memory = np.random.default_rng(seed), Finding(), Memory(bodies)
    started = time.perf_counter()
    with running(create_app(engine, INFO, chat=CHAT)) as url:
        parts = urlsplit(url)
        connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=30)
        while found.bodies < bodies:
            memory.watch(found.bodies)
            sent = body(dice)
            connection.request("POST", "/v1/chat/completions", sent, JSON)
            answer = connection.getresponse()
            found.count(answer.status, code_of(answer, answer.read(), sent))
        connection.close()
        deadline_s = time.monotonic() + SETTLE_S  # a stream's session is freed just behind its last byte
        while engine.session_count or engine.reserved_bytes:
            assert time.monotonic() < deadline_s, f"{engine.session_count} sessions were left behind"
            time.sleep(0.01)
    found.growth_mb, found.seconds = memory.growth_mb(), time.perf_counter() - started
    return found


def code_of(answer: http.client.HTTPResponse, content: bytes, sent: bytes) -> str:
    """`ok`, `stream`, or the code of an error.

    Raises:
        AssertionError: none of them.
    """
    seen = (sent, answer.status, content)
    assert answer.status < 500, seen
    if answer.headers.get_content_type() == "text/event-stream":
        assert answer.status == 200 and content.endswith(b"data: [DONE]\n\n"), seen
        return "stream"
    reply = json.loads(content)
    if answer.status == 200:
        assert reply["choices"][0]["finish_reason"] in ("stop", "length"), seen
        return "ok"
    assert set(reply["error"]) == {"message", "type", "param", "code"}, seen
    return str(reply["error"]["code"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bodies", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=20261011)
    options = parser.parse_args()
    found = fuzz_chat(options.bodies, options.seed)
    show("chat calls", found)
    assert found.growth_mb < 32.0, "memory grew"


if __name__ == "__main__":
    main()
