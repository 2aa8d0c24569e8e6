"""The wire fuzzer: mutated bodies against the calls themselves and against a real HTTP server.

Run: `make fuzz` (1,000,000 bodies in this process, 10,000 over HTTP). It fails on a 5xx, an exception that is no
refusal, a session left behind, or memory that grows.
"""

import argparse
import gc
import http.client
import time
from collections import Counter
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import psutil

from hyco_export.errors import HycoError
from hyco_export.protocol import wire
from hyco_export.protocol.refusals import STATUS_OF, as_refusal
from hyco_export.server.admission import Facts, Limits
from hyco_export.server.engine import Engine
from hyco_export.server.http import create_app, round_number
from tests.endurance.mutation import Mutator
from tests.support.live_server import running
from tests.support.scripted import STOP_ID, VOCAB_SIZE, WINDOW, ScriptedSession, ToyLanguageModel

MODEL = ToyLanguageModel(stop_bias=-2.0)
FACTS = Facts(VOCAB_SIZE, frozenset({STOP_ID}), 4096, "head", WINDOW, 4)
LIMITS = Limits(sessions=8, node_limit=32, prompt_limit=100)
INFO = wire.ServerInfo(1, "fuzzed", "v", "t", VOCAB_SIZE, [STOP_ID], "head", "k", 32, 100, 4, ["exact"], "thread-cpu")
WARM_UP = 0.2  # share of the bodies after which memory must stay
MB = 1e6
OK = 200
HEADERS = (
    "Authorization", "Content-Type", "Content-Encoding", "Origin", "Expect", "Accept-Encoding", "Range", "Cookie",
)  # fmt: skip
BODY = {"Content-Type": wire.MEDIA_TYPE}


@dataclass
class Finding:
    """What a run saw. `growth_mb` is memory at the end beyond that after the warm-up."""

    bodies: int = 0
    statuses: Counter[int] = field(default_factory=Counter)
    codes: Counter[str] = field(default_factory=Counter)
    growth_mb: float = 0.0
    seconds: float = 0.0

    def count(self, status: int, code: str) -> None:
        self.bodies += 1
        self.statuses[status] += 1
        self.codes[code] += 1


class Caller:
    """Somebody who sends mutated bodies and remembers just enough to send right ones, too."""

    def __init__(self, seed: int) -> None:
        self.mutator = Mutator(seed)
        self.ids: list[int] = []
        self.session = ""
        self.next_round = 1
        self.on_server = False
        self.over = True  # a new session is needed

    def prime(self) -> wire.PrimeRequest:
        """A right PRIME."""
        dice = self.mutator.dice
        self.on_server = bool(dice.random() < 0.2)
        with_head = bool(dice.random() < 0.5) and not self.on_server
        return wire.PrimeRequest(
            version=wire.PROTOCOL_VERSION,
            prompt=[int(token) for token in dice.integers(2, VOCAB_SIZE, int(dice.integers(1, 30)))],
            sampling=wire.Sampling(float(dice.choice([0.0, 1.0])), 8, 0.95),
            acceptance=wire.Acceptance("epsilon", 0.05) if dice.random() < 0.5 else wire.EXACT,
            seed=int(dice.integers(1 << 40)),
            max_new_tokens=int(dice.integers(1, 60)),
            draft_side="server" if self.on_server else "device",
            draft_steps=4 if self.on_server else 0,
            head_digest="head" if with_head else "",
            first_rows=2 if with_head else 0,
        )

    def round(self) -> wire.VerifyRequest:
        """A round that is right but for its tree, at times: too large, or with equal siblings."""
        dice = self.mutator.dice
        tokens = [] if self.on_server else [2, 3, 4, 5, 6]
        parents = [] if self.on_server else [-1, -1, 0, 0, 2]
        if dice.random() < 0.1:
            parents = [int(dice.integers(-1, node)) for node in range(int(dice.integers(0, 40)))]
            tokens = [int(token) for token in dice.integers(0, VOCAB_SIZE, len(parents))]
        digest = wire.committed_digest(self.ids)
        return wire.VerifyRequest(wire.PROTOCOL_VERSION, len(self.ids), digest, tokens, parents)

    def primed(self, prompt: list[int], reply: wire.PrimeReply) -> None:
        self.session, self.ids, self.next_round = reply.session, [*prompt, reply.root], 1
        self.over = bool(reply.finished)

    def verified(self, reply: wire.VerifyReply) -> None:
        if reply.round == self.next_round:
            self.ids += reply.tokens
            self.next_round += 1


def fuzz_calls(bodies: int, seed: int) -> Finding:
    """Bodies through the decoder into an engine, as the HTTP handlers do it.

    Raises:
        AssertionError: a fault of the server's own; it names the body.
    """
    engine = Engine(lambda: ScriptedSession(MODEL), FACTS, LIMITS)
    caller, found, memory = Caller(seed), Finding(), Memory(bodies)
    started = time.perf_counter()
    while found.bodies < bodies:
        memory.watch(found.bodies)
        if caller.over or caller.mutator.dice.random() < 0.02:
            engine.close(caller.session)
            right = caller.prime()
            caller.primed(right.prompt, engine.prime(right))
        is_prime = bool(caller.mutator.dice.random() < 0.4)
        on_server = caller.on_server
        body = caller.mutator.body(caller.prime() if is_prime else caller.round())
        caller.on_server = on_server
        try:
            if is_prime:
                primed = engine.prime(wire.decode(body, wire.PrimeRequest))
                engine.close(primed.session)
            else:
                number = round_number(caller.mutator.number(caller.next_round))
                caller.verified(engine.verify(caller.session, number, wire.decode(body, wire.VerifyRequest)))
            found.count(OK, "ok")
        except HycoError as error:
            refusal = as_refusal(error)
            assert STATUS_OF[refusal.code] < 500, (found.bodies, body.hex(), refusal)
            found.count(STATUS_OF[refusal.code], refusal.code)
            if refusal.code in ("session_finished", wire.UNKNOWN_SESSION):
                caller.over = True
        except Exception as error:
            raise AssertionError(f"body {found.bodies} of seed {seed}: {body.hex()}") from error
    engine.close(caller.session)
    assert engine.session_count == 0, f"{engine.session_count} sessions were left behind"
    found.growth_mb, found.seconds = memory.growth_mb(), time.perf_counter() - started
    return found


def fuzz_http(bodies: int, seed: int) -> Finding:
    """Bodies, paths, methods and headers over a socket to a server in this process."""
    engine = Engine(lambda: ScriptedSession(MODEL), FACTS, LIMITS)
    caller, found, memory = Caller(seed), Finding(), Memory(bodies)
    started = time.perf_counter()
    with running(create_app(engine, INFO)) as url:
        parts = urlsplit(url)
        connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=30)
        while found.bodies < bodies:
            memory.watch(found.bodies)
            if caller.over or caller.mutator.dice.random() < 0.02:
                _http_prime(connection, caller)
            _http_step(connection, caller, found)
        connection.request("DELETE", f"/v1/sessions/{caller.session}")
        connection.getresponse().read()
        connection.request("GET", "/readyz")
        assert connection.getresponse().read() == b"ready\n"
        connection.close()
    assert engine.session_count == 0
    found.growth_mb, found.seconds = memory.growth_mb(), time.perf_counter() - started
    return found


def _http_prime(connection: http.client.HTTPConnection, caller: Caller) -> None:
    if caller.session:
        connection.request("DELETE", f"/v1/sessions/{caller.session}")
        connection.getresponse().read()
    right = caller.prime()
    connection.request("POST", "/v1/sessions", wire.encode(right), BODY)
    caller.primed(right.prompt, wire.decode(connection.getresponse().read(), wire.PrimeReply))


def _http_step(connection: http.client.HTTPConnection, caller: Caller, found: Finding) -> None:
    dice = caller.mutator.dice
    is_prime = bool(dice.random() < 0.4)
    on_server = caller.on_server
    body = caller.mutator.body(caller.prime() if is_prime else caller.round())
    caller.on_server = on_server
    method, headers = "POST", dict(BODY)
    path = "/v1/sessions"
    if not is_prime:
        number = caller.mutator.number(caller.next_round)
        path += f"/{caller.session}/rounds/{number.encode().hex() if not number.isascii() else number}"
    fate = dice.random()
    if fate < 0.05:
        method = str(dice.choice(["GET", "PUT", "DELETE", "OPTIONS", "PATCH"]))
    elif fate < 0.1:
        path = str(
            dice.choice(["/", "/v1", "/v1/sessions/", "//v1/sessions", path + "/x", path + "?q=1", "/v1/%2e%2e/"])
        )
    elif fate < 0.15:
        name = str(dice.choice(HEADERS))
        headers[name] = dice.bytes(int(dice.integers(1, 60))).hex()
    connection.request(method, path, body, headers)
    answer = connection.getresponse()
    content = answer.read()
    assert answer.status < 500, (found.bodies, method, path, body.hex(), answer.status, content)
    if answer.status < 300:
        found.count(answer.status, "ok")
        if path == "/v1/sessions" and method == "POST":
            connection.request("DELETE", f"/v1/sessions/{wire.decode(content, wire.PrimeReply).session}")
            connection.getresponse().read()
        elif "/rounds/" in path and method == "POST":
            caller.verified(wire.decode(content, wire.VerifyReply))
        return
    ours = answer.headers.get_content_type() == wire.MEDIA_TYPE
    code = wire.decode(content, wire.Refusal).code if ours else f"status {answer.status}"
    assert not ours or STATUS_OF[code] == answer.status
    found.count(answer.status, code)
    if code in ("session_finished", wire.UNKNOWN_SESSION):
        caller.over = True


class Memory:
    """This process' memory after the warm-up and at the end."""

    def __init__(self, bodies: int) -> None:
        self._warm = int(bodies * WARM_UP)
        self._process = psutil.Process()
        self._before = 0

    def watch(self, done: int) -> None:
        if done == self._warm:
            self._before = self._used()

    def growth_mb(self) -> float:
        return (self._used() - self._before) / MB

    def _used(self) -> int:
        gc.collect()
        return int(self._process.memory_info().rss)


def show(title: str, found: Finding) -> None:
    print(
        f"\n{title}: {found.bodies:,} bodies in {found.seconds:.0f} s, memory {found.growth_mb:+.1f} MB after warm-up"
    )
    for code, count in found.codes.most_common():
        print(f"  {code:20}{STATUS_OF.get(code, ''):>5}{count:>12,}{count / found.bodies:>8.2%}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bodies", type=int, default=1_000_000)
    parser.add_argument("--http", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=20261011)
    options = parser.parse_args()
    calls = fuzz_calls(options.bodies, options.seed)
    show("in process", calls)
    over_http = fuzz_http(options.http, options.seed + 1)
    show("over HTTP", over_http)
    for found in (calls, over_http):
        assert found.growth_mb < 32.0, "memory grew"


if __name__ == "__main__":
    main()
