"""The record of a generation: what was proposed, accepted, drawn and sent in every round, and how long it took.

Plain values, written as JSON lines and read back equal, so that metrics (`evaluate.metrics`) and replays need nothing
but the file.
"""

from collections.abc import Iterable, Iterator

import msgspec

from hyco_export.protocol import wire
from hyco_export.protocol.tree import Tree
from hyco_export.protocol.wire import Traffic


class PrimeTrace(msgspec.Struct, frozen=True, tag="prime", tag_field="record"):
    """One PRIME call. The first starts the session; later ones (`continue_from` > 0) replace a lost session.

    `lost_ms` is set where the call was disturbed: sent again, or made for a lost session. It is the time since the step
    before, failed tries and a lost draft included; no figure of time counts it.
    """

    start_ms: float  # since the request began
    prompt_length: int  # ids sent, those already generated included
    continue_from: int  # how many of them were already generated
    root: int  # the token that the call committed
    finished: str  # "", "stop" or "length"
    wait_ms: float  # request sent to reply decoded
    prefill_ms: float  # device: ring of the head filled, SLM prefilled; not part of drafting
    server_ms: float
    traffic: Traffic
    lost_ms: float | None = None


class LocalTrace(msgspec.Struct, frozen=True, tag="local", tag_field="record"):
    """Tokens that the device committed without asking the verifier. `kept` are their rows of `tree`."""

    start_ms: float  # since the request began
    length: int  # committed ids before them
    tree: Tree
    kept: tuple[int, ...]
    tokens: tuple[int, ...]
    finished: str  # "", "stop" or "length"
    head_ms: float
    slm_ms: float
    draft_ms: float  # of the proposal; the round that sends the rest of it counts 0


class RoundTrace(msgspec.Struct, frozen=True, tag="round", tag_field="record"):
    """One VERIFY call: `tree` as it was sent, `accepted` its rows from depth 1 down, `tokens` committed, bonus last.

    `drawn[i]` is False where accepted row i was taken by the threshold alone. `drafted` counts nodes that the server
    drafted itself; `accepted` then counts rows of the server's own chain. When `finished` is not empty the path may be
    cut: `tokens` then ends at the stop id or at the token cap, perhaps without a bonus. `lost_ms` as in `PrimeTrace`;
    rounds that bring the rest of a first window again, after a lost session, are disturbed too.
    """

    round: int  # number within the session, from 1
    start_ms: float  # since the request began
    length: int  # committed ids before the round, root included
    tree: Tree
    accepted: tuple[int, ...]
    drawn: tuple[bool, ...]
    tokens: tuple[int, ...]
    finished: str
    drafted: int
    head_ms: float  # the head's K steps
    slm_ms: float  # the SLM's passes
    draft_ms: float  # the whole proposal: head, SLM, scoring
    wait_ms: float  # request sent to reply decoded
    commit_ms: float  # device: accepted rows and hand-off copied into the rings
    server_ms: float
    traffic: Traffic
    kept: tuple[int, ...] = ()  # unverified tokens that the round brought; its root is the last of them
    reused: int = 0  # nodes of the tree that were drafted while the last reply was on its way
    ahead_ms: float = 0.0  # device: drafting while this round's reply was on its way, part of the wait
    evidence: wire.Evidence | None = None  # p~ of every node and draws of every row, on request
    older_bytes: int = 0  # K/V rows of the first window that came with this reply
    lost_ms: float | None = None


class GenerationTrace(msgspec.Struct, frozen=True, tag="generation", tag_field="record"):
    """One request from its prompt to its end. `tokens` are all generated ids, the first one drawn by PRIME included."""

    system: str
    prompt_id: str
    seed: int
    prompt_length: int
    tokens: tuple[int, ...]
    finished: str  # "stop" or "length"
    total_ms: float  # request begun to last token
    first_token_ms: float
    primes: tuple[PrimeTrace, ...]
    rounds: tuple[RoundTrace, ...]
    sampling: wire.Sampling = wire.PAPER_SAMPLING
    acceptance: wire.Acceptance = wire.EXACT
    max_new_tokens: int = 0
    stop_ids: tuple[int, ...] = ()  # of the server
    locals: tuple[LocalTrace, ...] = ()

    @property
    def disturbed(self) -> tuple[PrimeTrace | RoundTrace, ...]:
        """Calls that were sent again or made for a lost session."""
        calls: tuple[PrimeTrace | RoundTrace, ...] = (*self.primes, *self.rounds)
        return tuple(call for call in calls if call.lost_ms is not None)


Record = GenerationTrace | PrimeTrace | RoundTrace | LocalTrace


def to_lines(trace: GenerationTrace) -> Iterator[bytes]:
    """JSON lines of a generation: its own record without calls, then its calls and local steps in time order."""
    yield msgspec.json.encode(msgspec.structs.replace(trace, primes=(), rounds=(), locals=()))
    steps: list[PrimeTrace | RoundTrace | LocalTrace] = [*trace.primes, *trace.rounds, *trace.locals]
    for step in sorted(steps, key=lambda step: step.start_ms):
        yield msgspec.json.encode(step)


def from_lines(lines: Iterable[bytes]) -> Iterator[GenerationTrace]:
    """The generations of a JSONL file, one after the other.

    Raises:
        msgspec.DecodeError: a line is not a record.
        ValueError: the first line is a call that belongs to no generation.
    """
    head: GenerationTrace | None = None
    steps: list[PrimeTrace | RoundTrace | LocalTrace] = []
    for line in lines:
        record = msgspec.json.decode(line, type=Record)
        if isinstance(record, GenerationTrace):
            if head is not None:
                yield _whole(head, steps)
            head, steps = record, []
        elif head is None:
            raise ValueError("a trace starts with a generation record, not with a call")
        else:
            steps.append(record)
    if head is not None:
        yield _whole(head, steps)


def _whole(head: GenerationTrace, steps: Iterable[PrimeTrace | RoundTrace | LocalTrace]) -> GenerationTrace:
    steps = tuple(steps)
    return msgspec.structs.replace(
        head,
        primes=tuple(step for step in steps if isinstance(step, PrimeTrace)),
        rounds=tuple(step for step in steps if isinstance(step, RoundTrace)),
        locals=tuple(step for step in steps if isinstance(step, LocalTrace)),
    )
