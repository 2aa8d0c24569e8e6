"""A system simulated round by round: clients on one server, every call over the link, passes shared where calls wait.

Each client asks for one answer after the other: PRIME, then draft, send, verify, commit until it is long enough. The
server makes one pass at a time: the prefill of one prompt, or the verification of all calls that wait, `batch` at most;
who came first decides which. All clients run the same system.
"""

import heapq
from collections import Counter, deque
from collections.abc import Callable
from functools import partial

import msgspec
import numpy as np

from hyco_export.core.numerics import MS_PER_S
from hyco_export.device.link import LinkDice
from hyco_export.errors import HycoError
from hyco_export.evaluate.planning.inputs import Inputs, LinkTimes, acceptance_of, shape_of

BONUS = "bonus"
MOST_CLIENTS = 1_000  # a pass looks through all calls that wait
MOST_TOKENS = 10_000_000  # of a system: some minutes for all of them
LEAF_PASSES = 1  # of drafting ahead: the sent tree's leaves are forwarded before one is guessed


class Options(msgspec.Struct, frozen=True):
    """How much is simulated."""

    clients: int = 1  # at once
    batch: int = 8  # calls in one pass, at most
    answers: int = 200  # of each client
    seed: int = 20261011


class Outcome(msgspec.Struct, frozen=True):
    """Figures of one system, pooled over all answers, as `evaluate.metrics` defines them."""

    system: str
    tokens: int
    rounds: int
    mat: float
    server_ms_per_token: float  # g; a shared pass counts once
    tokens_per_s: float  # delivered to one client
    draft_ms_per_token: float
    bytes_per_token: float  # both ways, first reply and prompt included
    first_token_ms: float  # mean
    server_busy: float  # share of the time
    tokens_by_source: dict[str, int]


class _Client:
    """Where a client is in its answer, and its sums."""

    def __init__(self) -> None:
        self.answers = 0
        self.started_ms = self.sent_ms = 0.0
        self.tokens = 0  # of the current answer


class Simulation:
    """One system with its clients.

    Args:
        name: of the system.
        inputs: all times, link, workload.
        options: clients, batch, length, seed.

    Raises:
        HycoError: a system that cannot be planned, or acceptance that no tree can have.
    """

    def __init__(self, name: str, inputs: Inputs, options: Options) -> None:
        self._name, self._inputs, self._options = name, inputs, options
        self._given = given = inputs.systems[name]
        self._shape = shape = shape_of(name, given, inputs.budget, inputs.steps)
        self._acceptance = acceptance_of(given, shape)
        self._pass_ms = inputs.device.slm_pass_ms + inputs.device.host_ms
        self._draft_ms = shape.passes * self._pass_ms + (inputs.device.head_ms if shape.device_head else 0.0)
        self._late_ms = inputs.server.late_ms(shape.rows)
        self._dice = np.random.Generator(np.random.Philox(options.seed))
        self._link = _Link(inputs.link, options.seed)
        self._now_ms = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._made = 0  # events so far: those of one time happen in the order in which they were made
        self._waiting: deque[tuple[_Client, bool]] = deque()  # at the server; True: a prompt
        self._serving = False
        self._sources: Counter[str] = Counter()
        self._tokens = self._committed = self._rounds = self._bytes = 0
        self._busy_ms = self._drafted_ms = self._answer_ms = self._first_ms = 0.0

    def run(self) -> Outcome:
        """To the last answer of the last client."""
        for _ in range(self._options.clients):
            self._start(_Client())
        while self._events:
            self._now_ms, _, happen = heapq.heappop(self._events)
            happen()
        answers = self._options.clients * self._options.answers
        return Outcome(
            system=self._name,
            tokens=self._tokens,
            rounds=self._rounds,
            mat=self._committed / self._rounds,
            server_ms_per_token=self._busy_ms / self._tokens,
            tokens_per_s=MS_PER_S * self._tokens / self._answer_ms,
            draft_ms_per_token=self._drafted_ms / self._tokens,
            bytes_per_token=self._bytes / self._tokens,
            first_token_ms=self._first_ms / answers,
            server_busy=self._busy_ms / self._now_ms,
            tokens_by_source=dict(self._sources),
        )

    def _after(self, ms: float, happen: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self._now_ms + ms, self._made, happen))
        self._made += 1

    def _start(self, client: _Client) -> None:
        client.started_ms, client.tokens = self._now_ms, 0
        given, seen_ms = self._given, self._seen_first_ms()
        self._bytes += given.first_up_bytes + given.first_down_bytes
        up_ms = self._link.up_ms(given.first_up_bytes, self._now_ms) if seen_ms is None else seen_ms
        self._after(up_ms, partial(self._arrive, client, True))

    def _seen_first_ms(self) -> float | None:
        """Time to the first token beside the prefill, where it was seen."""
        seen = self._given.first_token_ms
        if seen is None:
            seen = self._inputs.workload.first_token_ms
        return None if seen is None else max(0.0, seen - self._inputs.server.prefill_ms)

    def _arrive(self, client: _Client, prompt: bool) -> None:
        self._waiting.append((client, prompt))
        self._serve()

    def _serve(self) -> None:
        """Begin a pass, if none runs and calls wait."""
        if self._serving or not self._waiting:
            return
        self._serving = True
        prompt = self._waiting[0][1]
        if prompt:
            calls = [self._waiting.popleft()]
            pass_ms = self._inputs.server.prefill_ms
        else:
            calls = [call for call in self._waiting if not call[1]][: self._options.batch]
            for call in calls:
                self._waiting.remove(call)
            pass_ms = self._inputs.server.verify_ms(len(calls) * self._shape.rows)
        if self._shape.head_at_prime if prompt else self._shape.server_head:
            pass_ms += self._inputs.server.head_ms
        self._busy_ms += pass_ms
        self._after(pass_ms, partial(self._reply, [client for client, _ in calls], prompt))

    def _reply(self, clients: list[_Client], prompt: bool) -> None:
        self._serving = False
        given = self._given
        for client in clients:
            if prompt:
                seen = self._seen_first_ms() is not None
                down_ms = 0.0 if seen else self._link.down_ms(given.first_down_bytes, self._now_ms)
                self._after(down_ms, partial(self._primed, client))
                continue
            tokens = self._walk(self._inputs.workload.answer_tokens - client.tokens)
            size = round(given.down_bytes + given.down_bytes_per_token * tokens)
            self._bytes += size
            down_ms = self._late_ms + self._link.down_ms(size, self._now_ms)
            self._after(down_ms, partial(self._received, client, tokens))
        self._serve()

    def _walk(self, room: int) -> int:
        """Down the tree until nothing is taken; tokens that the round commits, its bonus counted."""
        self._rounds += 1
        tokens = 0
        for shares in self._acceptance:
            draw, taken = self._dice.random(), ""
            for source, share in shares.items():
                if draw < share:
                    taken = source
                    break
                draw -= share
            if not taken or tokens == room:
                break
            self._sources[taken] += 1
            tokens += 1
        if tokens < room:
            self._sources[BONUS] += 1
            tokens += 1
        self._committed += tokens
        return tokens

    def _primed(self, client: _Client) -> None:
        self._first_ms += self._now_ms - client.started_ms
        self._commit(client, 1, self._inputs.device.prefill_ms)

    def _received(self, client: _Client, tokens: int) -> None:
        """The reply is there; a device that drafts ahead may be in the middle of a pass."""
        late_ms = self._ahead(self._now_ms - client.sent_ms) if self._shape.ahead else 0.0
        self._after(late_ms, partial(self._commit, client, tokens, self._inputs.device.commit_ms))

    def _ahead(self, wait_ms: float) -> float:
        """Milliseconds that drafting ahead goes on behind the wait; all of it counts as drafting."""
        most = LEAF_PASSES + self._shape.passes
        if not self._pass_ms:
            return 0.0
        made = most
        if self._inputs.device.looks_between_passes:
            made = min(most, int(-(-wait_ms // self._pass_ms)))
        self._drafted_ms += made * self._pass_ms
        return max(0.0, made * self._pass_ms - wait_ms)

    def _commit(self, client: _Client, tokens: int, work_ms: float) -> None:
        client.tokens += tokens
        self._tokens += tokens
        if client.tokens < self._inputs.workload.answer_tokens:
            self._drafted_ms += self._draft_ms
            self._after(work_ms + self._draft_ms, partial(self._send, client))
            return
        self._answer_ms += self._now_ms - client.started_ms
        client.answers += 1
        if client.answers < self._options.answers:
            self._start(client)

    def _send(self, client: _Client) -> None:
        client.sent_ms = self._now_ms
        self._bytes += self._given.up_bytes
        self._after(self._link.up_ms(self._given.up_bytes, self._now_ms), partial(self._arrive, client, False))


class _Link:
    """A link over time; every point has random draws of its own."""

    def __init__(self, link: LinkTimes, seed: int) -> None:
        self._link = link
        self._dice = [LinkDice(part, seed + number) for number, part in enumerate(link.links())]

    def up_ms(self, size_bytes: int, now_ms: float) -> float:
        return self._dice[self._link.at(now_ms)].up_ms(size_bytes)

    def down_ms(self, size_bytes: int, now_ms: float) -> float:
        return self._dice[self._link.at(now_ms)].down_ms(size_bytes)


def check_size(inputs: Inputs, options: Options) -> None:
    """Refuse what would not end within minutes.

    Raises:
        HycoError: more than MOST_CLIENTS, or more than MOST_TOKENS.
    """
    clients, answers, length = options.clients, options.answers, inputs.workload.answer_tokens
    if clients > MOST_CLIENTS:
        raise HycoError(f"--clients {clients:,} is above {MOST_CLIENTS:,}, the most that are simulated", "give fewer")
    if (tokens := clients * answers * length) > MOST_TOKENS:
        fitting = MOST_TOKENS // (clients * length)
        raise HycoError(
            f"--clients {clients:,} x --answers {answers:,} x {length:,} tokens of an answer are {tokens:,} tokens;"
            f" at most {MOST_TOKENS:,} are simulated",
            f"give --answers {fitting}" if fitting else "give fewer clients or shorter answers (--answer-tokens)",
        )


def simulate(inputs: Inputs, options: Options) -> tuple[Outcome, ...]:
    """Every system of the inputs, in their order. Raises as `Simulation`, and as `check_size`."""
    check_size(inputs, options)
    return tuple(Simulation(name, inputs, options).run() for name in inputs.systems)
