"""Replay: judge the logged trees of a trace by another acceptance rule, offline.

Every round is judged on its own: after a verdict that differs, the next logged tree is still the one that was drafted
behind the recorded tokens. MAT by rule on fixed trees is therefore a comparison of rules, not a forecast of a run
(HyCo, §3.5, compares thresholds in the same way). The recorded rule gives the recorded verdicts again, exactly.
"""

from collections.abc import Iterator, Sequence

import msgspec

from hyco_export.errors import HycoError
from hyco_export.evaluate.metrics import threshold_stop, tokens_by_rule
from hyco_export.protocol import wire
from hyco_export.protocol.acceptance import EPSILON, RULES, STOP_NEEDS_DRAW, Judged, check_acceptance, decide, settle
from hyco_export.protocol.trace import GenerationTrace, RoundTrace

PAPER_EPSILON = 0.005  # §3.5


class Replayed(msgspec.Struct, frozen=True):
    """One rule over all rounds of a trace."""

    acceptance: dict[str, object]  # the rule and the options that it was given
    rounds: int
    mat: float  # tokens committed / rounds
    tokens_by_rule: dict[str, int]
    threshold_stops: int  # rounds that end with a stop token which only the threshold took
    differing: int  # rounds that commit other tokens than the recorded ones

    @property
    def label(self) -> str:
        """The rule with its options."""
        options = [f"{name}={value}" for name, value in self.acceptance.items() if name != "rule"]
        return " ".join([str(self.acceptance["rule"]), *options])


def replay(traces: Sequence[GenerationTrace], settings: wire.Acceptance) -> Replayed:
    """Judge every round of `traces` by `settings`.

    Raises:
        ProtocolError: such settings are no rule.
        HycoError: the trace was written without p~, or has no round.
    """
    check_acceptance(settings)
    recorded = [record for trace in traces for record in trace.rounds]
    judged = [record for trace in traces for record in rejudge(trace, settings)]
    if not judged:
        raise HycoError(
            "the trace holds no round", "give that of a system that asks a server, or record longer answers"
        )
    return Replayed(
        acceptance=named_options(settings),
        rounds=len(judged),
        mat=sum(len(record.tokens) for record in judged) / len(judged),
        tokens_by_rule=tokens_by_rule(judged),
        threshold_stops=sum(map(threshold_stop, judged)),
        differing=sum(one.tokens != other.tokens for one, other in zip(judged, recorded, strict=True)),
    )


def rejudge(trace: GenerationTrace, settings: wire.Acceptance) -> Iterator[RoundTrace]:
    """The trace's rounds with the verdicts of another rule.

    Raises:
        HycoError: a round without p~.
    """
    stop_ids = frozenset(trace.stop_ids)
    for record in trace.rounds:
        if record.evidence is None:
            raise HycoError(
                f"round {record.round} of {trace.prompt_id} was logged without p~",
                "record with `hyco-export validate --traces DIR`, or `hyco-export bench --traces`",
            )
        judged = Judged.of(record.evidence)
        room = trace.max_new_tokens - (record.length + len(record.kept) - trace.prompt_length)
        outcome = settle(decide(judged, settings, stop_ids), judged.tokens, stop_ids, room)
        yield msgspec.structs.replace(
            record,
            accepted=outcome.accepted,
            drawn=outcome.drawn,
            tokens=outcome.tokens,
            finished=outcome.finished,
        )


def named_options(settings: wire.Acceptance) -> dict[str, object]:
    """The rule and those options that are not at their defaults."""
    defaults = wire.EXACT
    names = wire.Acceptance.__struct_fields__
    return {
        name: getattr(settings, name)
        for name in names
        if name == "rule" or getattr(settings, name) != getattr(defaults, name)
    }


def chosen_settings(
    rule: str | None, epsilons: Sequence[float], stop_needs_draw: bool, options: dict[str, float]
) -> tuple[wire.Acceptance, ...]:
    """The rules to try: one, or all; each epsilon rule once for every epsilon (the paper's without one).

    Raises:
        ProtocolError: an unknown rule, a value out of range, or an option that the rule does not read.
    """
    names = [rule] if rule is not None else list(RULES)
    chosen = []
    for name in names:
        reads = RULES[name].options if name in RULES else frozenset()
        given: dict[str, object] = {**options, **({STOP_NEEDS_DRAW: True} if stop_needs_draw else {})}
        if rule is None:  # of all rules each takes what it reads
            given = {option: value for option, value in given.items() if option in reads}
        asked = epsilons if rule is not None or EPSILON in reads else ()
        for epsilon in asked or ((PAPER_EPSILON,) if EPSILON in reads else (None,)):
            given |= {EPSILON: epsilon} if epsilon is not None else {}
            settings = msgspec.structs.replace(wire.EXACT, rule=name, **given)
            check_acceptance(settings)
            chosen.append(settings)
    return tuple(chosen)
