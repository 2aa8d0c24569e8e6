"""The record of a generation: what was proposed, accepted, drawn and sent in every round, and how long it took.

Plain values that become JSON lines and come back equal, so that metrics and replays need nothing but the file. Knows no
models; computes nothing (`evaluate.metrics` does).
"""

from collections.abc import Iterable, Iterator

import msgspec

from hyco_export.runtime import wire
from hyco_export.runtime.ports import Traffic
from hyco_export.runtime.tree import Tree


class PrimeTrace(msgspec.Struct, frozen=True, tag="prime", tag_field="record"):
    """One PRIME call. The first starts the session; later ones (`continue_from` > 0) replace a lost session."""

    start_ms: float  # since the request began
    prompt_length: int  # ids sent, those already generated included
    continue_from: int  # how many of them were already generated
    root: int  # the token that the call committed
    finished: str  # "", "stop" or "length"
    wait_ms: float  # request sent to reply decoded
    prefill_ms: float  # device: ring of the head filled, SLM prefilled; not part of drafting
    server_ms: float
    traffic: Traffic


class RoundTrace(msgspec.Struct, frozen=True, tag="round", tag_field="record"):
    """One VERIFY call: `tree` as it was sent, `accepted` its rows from depth 1 down, `tokens` committed, bonus last.

    `drawn[i]` is False where accepted row i was taken by the threshold alone. `drafted` counts nodes that the server
    drafted itself; `accepted` then counts rows of the server's own chain. When `finished` is not empty the path may be
    cut: `tokens` then ends at the stop id or at the token cap, perhaps without a bonus.
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
    evidence: wire.Evidence | None = None  # what the server judged by: p~ of every node, draws of every row; on request


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
    sampling: wire.Sampling = wire.Sampling()
    acceptance: wire.Acceptance = wire.Acceptance()
    max_new_tokens: int = 0
    stop_ids: tuple[int, ...] = ()  # of the server


Record = GenerationTrace | PrimeTrace | RoundTrace


def to_lines(trace: GenerationTrace) -> Iterator[bytes]:
    """JSON lines of a generation: its own record with no calls in it, then every PRIME and every round."""
    yield msgspec.json.encode(msgspec.structs.replace(trace, primes=(), rounds=()))
    for call in (*trace.primes, *trace.rounds):
        yield msgspec.json.encode(call)


def from_lines(lines: Iterable[bytes]) -> Iterator[GenerationTrace]:
    """The generations of a JSONL file, one after the other.

    Raises:
        msgspec.DecodeError: a line is not a record.
        ValueError: the first line is a call that belongs to no generation.
    """
    head: GenerationTrace | None = None
    primes: list[PrimeTrace] = []
    rounds: list[RoundTrace] = []
    for line in lines:
        record = msgspec.json.decode(line, type=Record)
        if isinstance(record, GenerationTrace):
            if head is not None:
                yield msgspec.structs.replace(head, primes=tuple(primes), rounds=tuple(rounds))
            head, primes, rounds = record, [], []
        elif head is None:
            raise ValueError("a trace starts with a generation record, not with a call")
        elif isinstance(record, PrimeTrace):
            primes.append(record)
        else:
            rounds.append(record)
    if head is not None:
        yield msgspec.structs.replace(head, primes=tuple(primes), rounds=tuple(rounds))
