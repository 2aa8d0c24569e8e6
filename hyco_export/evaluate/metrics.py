"""The paper's measures of a system, computed from its traces alone.

Pooled over all prompts given: sums are divided, ratios are never averaged.
"""

from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec
import numpy as np

from hyco_export.core.handoff import HandoffSpec
from hyco_export.core.keepset import MISSING, KeepSet
from hyco_export.core.numerics import MS_PER_S
from hyco_export.errors import HycoError, counted
from hyco_export.protocol import wire
from hyco_export.protocol.trace import GenerationTrace, PrimeTrace, RoundTrace
from hyco_export.protocol.tree import Source

SOURCE_NAMES = {Source.CHAIN: "chain", Source.RUNNER_UP: "runner-up", Source.SLM: "slm"}
BONUS = "bonus"
HYCO = "hyco"  # the paper's system
DRAW, THRESHOLD = "draw", "threshold only"
NO_ROUNDS = float("nan")  # of a ratio over rounds, for a system that asks no server
NIL = b"\xc0"  # MessagePack's, where a field is absent


class DepthAcceptance(msgspec.Struct, frozen=True):
    """`trials`: rounds whose chain tokens above this depth were all taken; `accepted`: those that took this one too."""

    depth: int
    accepted: int
    trials: int

    @property
    def share(self) -> float:
        return self.accepted / self.trials if self.trials else float("nan")


class ByteCounts(msgspec.Struct, frozen=True):
    """Bytes of one direction per VERIFY round: bodies alone, and with HTTP headers (undisturbed rounds only)."""

    payload_mean: float
    payload_max: int
    wire_mean: float
    wire_max: int


class Disturbances(msgspec.Struct, frozen=True):
    """What happened to a system's calls. Figures of time leave out these calls, their tokens and `ms`."""

    reprimes: int  # sessions that the server had lost, primed again
    repeats: int  # failed tries: broken connections, no answer in time, 429 and 503
    calls: int  # left out
    ms: float  # from the last undisturbed step to the end of each of them

    def __str__(self) -> str:
        """In words; empty where there was none."""
        counts = ((self.reprimes, "primed again"), (self.repeats, "sent again"))
        return ", ".join(f"{count} {what}" for count, what in counts if count)


UNDISTURBED = Disturbances(0, 0, 0, 0.0)


class SystemMetrics(msgspec.Struct, frozen=True):
    """One system over a prompt set. `_ms_per_token` are sums over all prompts divided by all output tokens.

    Times are those of undisturbed steps, over their tokens (`Disturbances`); nan where there is none. Tokens are
    counted in every round: a lost session changes where rounds begin, not what they commit.
    """

    system: str
    prompts: int
    output_tokens: int  # the tokens PRIME drew included
    rounds: int
    mat: float  # tokens committed by VERIFY rounds / rounds; PRIME's token counts in neither
    mat_with_prime: float  # the same with an answer's first PRIME as a round that commits one token
    server_ms_per_token: float  # g: prefill, verify and the head if the server runs it
    delivery_tokens_per_s: float
    draft_ms_per_token: float  # device: all passes, also those made while waiting; no waits, prefill or ring copies
    wait_ms_per_round: float
    first_token_ms: float  # mean time to first token
    chain_acceptance: tuple[DepthAcceptance, ...]
    tokens_by_source: dict[str, int]  # VERIFY rounds only
    tokens_by_rule: dict[str, int]
    threshold_stops: int  # answers that a stop token ended which only the threshold took
    unverified_tokens: int  # committed by the device unasked; they are in no count by source or by rule
    reused_rounds: int  # whose tree began with what was grown while the reply before was on its way
    bonus_misses: int  # bonus tokens outside the keep set
    bytes_up: ByteCounts
    bytes_down: ByteCounts
    disturbances: Disturbances
    capped_rounds: int  # cut by the token cap: they commit less than was accepted
    early_rounds: int  # that brought a part of a first window: drafts before them saw less of it

    @property
    def unverified_share(self) -> float:
        return self.unverified_tokens / self.output_tokens

    @property
    def bonus_miss_share(self) -> float:
        bonus = self.tokens_by_source[BONUS]
        return self.bonus_misses / bonus if bonus else 0.0


class SystemTraffic(msgspec.Struct, frozen=True):
    """The largest VERIFY round of a system, bodies only."""

    system: str
    up_max_bytes: int
    down_max_bytes: int
    down_overhead_max_bytes: int  # beyond the hand-off


def measure(system: str, traces: Sequence[GenerationTrace], keepset: KeepSet) -> SystemMetrics:
    """The measures of one system.

    Raises:
        HycoError: no trace has a VERIFY round or a local step, so that nothing can be measured.
    """
    rounds = [record for trace in traces for record in trace.rounds]
    local = [record for trace in traces for record in trace.locals]
    if not rounds and not local:
        seen = f"{system}: {counted(len(traces), 'answer')} without a round, there is nothing to measure"
        raise HycoError(seen, "ask for longer answers, or ask other prompts")
    primes = [record for trace in traces for record in trace.primes]
    answers = sum(record.continue_from == 0 for record in primes)
    timed = timed_steps(traces)
    output_tokens = sum(len(trace.tokens) for trace in traces)
    verified_tokens = sum(len(record.tokens) for record in rounds)
    bonus = np.array([token for record in rounds for token in record.tokens[len(taken(record)) :]], dtype=np.int64)
    server_ms = sum(call.server_ms for call in timed.primes) + sum(call.server_ms for call in timed.rounds)
    draft_ms = sum(r.draft_ms + r.ahead_ms for r in timed.rounds) + sum(record.draft_ms for record in local)
    return SystemMetrics(
        system=system,
        prompts=len(traces),
        output_tokens=output_tokens,
        rounds=len(rounds),
        mat=_ratio(verified_tokens, len(rounds)),
        mat_with_prime=_ratio(verified_tokens + answers, len(rounds) + answers),
        server_ms_per_token=_ratio(server_ms, timed.tokens),
        delivery_tokens_per_s=_ratio(MS_PER_S * timed.tokens, timed.ms if timed.tokens else 0.0),
        draft_ms_per_token=_ratio(draft_ms, timed.tokens),
        wait_ms_per_round=_ratio(sum(record.wait_ms for record in timed.rounds), len(timed.rounds)),
        first_token_ms=_ratio(sum(timed.first_token_ms), len(timed.first_token_ms)),
        chain_acceptance=chain_acceptance(rounds),
        tokens_by_source=tokens_by_source(rounds),
        tokens_by_rule=tokens_by_rule(rounds),
        threshold_stops=sum(map(threshold_stop, rounds)),
        unverified_tokens=sum(len(record.tokens) for record in local),
        reused_rounds=sum(record.reused > 0 for record in rounds),
        bonus_misses=int((keepset.rows(bonus) == MISSING).sum()),
        bytes_up=_byte_counts(
            [r.traffic.payload_up_bytes for r in rounds], [r.traffic.wire_up_bytes for r in timed.rounds]
        ),
        bytes_down=_byte_counts(
            [r.traffic.payload_down_bytes for r in rounds], [r.traffic.wire_down_bytes for r in timed.rounds]
        ),
        disturbances=disturbances(traces),
        capped_rounds=sum(r.finished == "length" and len(r.tokens) == len(r.accepted) for r in rounds),
        early_rounds=sum(r.older_bytes > 0 for r in rounds),
    )


class Timed(msgspec.Struct, frozen=True):
    """The undisturbed calls of generations, and what the generations took and committed without the other calls."""

    primes: tuple[PrimeTrace, ...]
    rounds: tuple[RoundTrace, ...]
    tokens: int
    ms: float
    first_token_ms: tuple[float, ...]  # of the generations whose first call was not disturbed


def timed_steps(traces: Iterable[GenerationTrace]) -> Timed:
    """The calls for figures of time: without those sent again or made for a lost session, which measure an outage."""
    traces = tuple(traces)
    lost = [call for trace in traces for call in trace.disturbed]
    return Timed(
        primes=tuple(call for trace in traces for call in trace.primes if call.lost_ms is None),
        rounds=tuple(call for trace in traces for call in trace.rounds if call.lost_ms is None),
        tokens=sum(len(trace.tokens) for trace in traces) - sum(map(_committed, lost)),
        ms=sum(trace.total_ms for trace in traces) - sum(call.lost_ms or 0.0 for call in lost),
        first_token_ms=tuple(
            trace.first_token_ms for trace in traces if not trace.primes or trace.primes[0].lost_ms is None
        ),
    )


def disturbances(traces: Iterable[GenerationTrace]) -> Disturbances:
    """Counted over all calls of the generations."""
    lost = [call for trace in traces for call in trace.disturbed]
    return Disturbances(
        reprimes=sum(isinstance(call, PrimeTrace) and call.continue_from > 0 for call in lost),
        repeats=sum(call.traffic.repeats for call in lost),
        calls=len(lost),
        ms=sum(call.lost_ms or 0.0 for call in lost),
    )


def headline(names: Sequence[str]) -> str:
    """The system that a summary names: `hyco`, or else the last one that asks a server."""
    return HYCO if HYCO in names else names[-1]


def caveats(systems: Sequence[SystemMetrics]) -> tuple[str, ...]:
    """Notes on disturbed, cut and early rounds, which change how figures are read; a line each."""
    lines = [
        f"{system.system}: {system.disturbances}. No figure of time holds these calls ({system.disturbances.calls}) "
        f"and the {system.disturbances.ms / MS_PER_S:.1f} s that they and the waiting took."
        for system in systems
        if system.disturbances.calls
    ]
    for field, what in (
        ("capped_rounds", "Rounds cut by the token cap, which count in MAT with what they committed"),
        ("early_rounds", "Rounds drafted before the first window was complete"),
    ):
        found = [f"{s.system} {getattr(s, field):,} of {s.rounds:,}" for s in systems if getattr(s, field)]
        lines += [f"{what}: {', '.join(found)}."] if found else []
    return tuple(lines)


def _committed(call: PrimeTrace | RoundTrace) -> int:
    return len(call.tokens) if isinstance(call, RoundTrace) else 1


def _ratio(total: float, count: float) -> float:
    return total / count if count else NO_ROUNDS


def taken(record: RoundTrace) -> tuple[int, ...]:
    """Accepted rows whose token was committed: a stop id or the token cap may have cut the path."""
    return record.accepted[: len(record.tokens)]


def chain_rows(record: RoundTrace) -> tuple[int, ...]:
    """Rows of the chain in depth order: those of the sent tree, or of the chain that the server drafted itself."""
    if record.drafted:
        return tuple(range(record.drafted))
    return tuple(row for row, source in enumerate(record.tree.sources) if source == Source.CHAIN)


def chain_acceptance(rounds: Iterable[RoundTrace]) -> tuple[DepthAcceptance, ...]:
    """Acceptance of the chain by depth, for as many depths as were ever tried.

    A depth counts as tried when every chain token above it was taken and the round committed a token at that depth:
    behind a stop id or the token cap the verifier was not asked.
    """
    accepted: Counter[int] = Counter()
    trials: Counter[int] = Counter()
    for record in rounds:
        path = set(taken(record))
        for depth, row in enumerate(chain_rows(record)[: len(record.tokens)], 1):
            trials[depth] += 1
            if row not in path:
                break
            accepted[depth] += 1
    return tuple(DepthAcceptance(depth, accepted[depth], trials[depth]) for depth in sorted(trials))


def tokens_by_source(rounds: Iterable[RoundTrace]) -> dict[str, int]:
    """Tokens committed by VERIFY rounds: chain, runner-up, slm (who proposed them) and bonus (the verifier's own)."""
    counts = dict.fromkeys((*SOURCE_NAMES.values(), BONUS), 0)
    for record in rounds:
        for source in sources_of(record):
            counts[source] += 1
    return counts


def sources_of(record: RoundTrace) -> tuple[str, ...]:
    """Who proposed each token that a VERIFY round committed, by the names of `tokens_by_source`."""
    rows = taken(record)
    sources = (Source.CHAIN if record.drafted else record.tree.sources[row] for row in rows)
    return (*(SOURCE_NAMES[Source(source)] for source in sources), *(BONUS,) * (len(record.tokens) - len(rows)))


def tokens_by_rule(rounds: Iterable[RoundTrace]) -> dict[str, int]:
    """Tokens committed by VERIFY rounds: equal to the verifier's draw, or taken by the threshold alone."""
    counts = {DRAW: 0, THRESHOLD: 0}
    for record in rounds:
        threshold_only = sum(not drawn for drawn in record.drawn[: len(taken(record))])
        counts[THRESHOLD] += threshold_only
        counts[DRAW] += len(record.tokens) - threshold_only
    return counts


def threshold_stop(record: RoundTrace) -> bool:
    """Did the round end the answer with a stop token that only the threshold took (HyCo's rule allows it)."""
    last = len(record.tokens) - 1
    return record.finished == "stop" and last < len(record.accepted) and not record.drawn[last]


def down_overhead_bytes(record: RoundTrace, handoff: HandoffSpec | None) -> int:
    """Bytes of a reply's body beyond its hand-off (e, h and the K/V of the old root and the accepted nodes,
    and what was left of the first window).

    `handoff` is None for a system whose head does not run on the device. A finishing round carries no hand-off, which
    makes the number negative: it is an upper bound on headers and ids, not their exact size.
    """
    rows = len(record.kept) + len(record.accepted) + 1
    carried = handoff.round_bytes + rows * handoff.row_bytes if handoff is not None else 0
    return record.traffic.payload_down_bytes - carried - record.older_bytes - evidence_bytes(record)


def evidence_bytes(record: RoundTrace) -> int:
    """Bytes of a reply's body that only traces need: 0 where p~ was not asked for."""
    return 0 if record.evidence is None else len(wire.encode(record.evidence)) - len(NIL)


def without_evidence(trace: GenerationTrace) -> GenerationTrace:
    """The generation as it would have been without p~ in the replies: fewer bytes, the same times."""
    return msgspec.structs.replace(trace, rounds=tuple(map(_lean, trace.rounds)))


def _lean(record: RoundTrace) -> RoundTrace:
    traffic, extra = record.traffic, evidence_bytes(record)
    fewer = msgspec.structs.replace(
        traffic,
        payload_down_bytes=traffic.payload_down_bytes - extra,
        wire_down_bytes=traffic.wire_down_bytes - extra,
    )
    return msgspec.structs.replace(record, evidence=None, traffic=fewer)


def measure_traffic(system: str, traces: Sequence[GenerationTrace], handoff: HandoffSpec | None) -> SystemTraffic:
    """The largest round of a system; `handoff` as in `down_overhead_bytes`.

    Raises:
        ValueError: no round: the system asks no server.
    """
    rounds = [record for trace in traces for record in trace.rounds]
    if not rounds:
        raise ValueError(f"{system}: no round whose bytes could be counted")
    return SystemTraffic(
        system=system,
        up_max_bytes=max(record.traffic.payload_up_bytes for record in rounds),
        down_max_bytes=max(record.traffic.payload_down_bytes for record in rounds),
        down_overhead_max_bytes=max(down_overhead_bytes(record, handoff) for record in rounds),
    )


def _byte_counts(payload: Sequence[int], wire_bytes: Sequence[int]) -> ByteCounts:
    """Of a round's body, and of all that HTTP sent for it; no rounds, no bytes."""
    bodies, all_bytes = np.array(payload or [0]), np.array(wire_bytes or [0])
    return ByteCounts(float(bodies.mean()), int(bodies.max()), float(all_bytes.mean()), int(all_bytes.max()))
