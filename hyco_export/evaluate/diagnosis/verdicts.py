"""Golden rounds under every acceptance rule, and a second implementation of PROTOCOL.md, "Acceptance".

The verdict that a round should have had follows exactly from its Evidence. It is worked out here in plain Python, one
node after the other, without the code that servers judge by.
"""

import math
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import numpy as np

from hyco_export.core.golden import GoldenDistribution
from hyco_export.protocol import wire

BELOW, ABOVE = 0.8, 1.25  # times a node's own value: a threshold that takes it, and one that does not
LEAST, MOST = 1e-3, 0.75  # values that thresholds are set by
UNREACHED = 1e6  # a slope with which only the other limit counts

Setting = Callable[[GoldenDistribution], wire.Acceptance]


class Verdict(NamedTuple):
    """The part of a verify reply that a rule decides."""

    accepted: list[int]
    drawn: list[bool]
    tokens: list[int]
    finished: str

    @classmethod
    def of(cls, reply: wire.VerifyReply) -> "Verdict":
        return cls(list(reply.accepted), list(reply.drawn), list(reply.tokens), reply.finished)


def settings_for(rules: Collection[str]) -> list[Setting]:
    """Settings of every known rule among `rules`: thresholds close to the values of a tree's first node, which all
    deeper nodes stand below."""
    known: list[tuple[str, Setting]] = [("exact", lambda golden: wire.EXACT)]
    for factor in (BELOW, ABOVE):
        known += [
            ("epsilon", _epsilon("epsilon", factor)),
            ("epsilon-at-rejections", _epsilon("epsilon-at-rejections", factor)),
            ("typical", _typical_cap(factor)),
            ("typical", _typical_slope(factor)),
        ]
    return [setting for rule, setting in known if rule in rules]


def _epsilon(rule: str, factor: float) -> Setting:
    return lambda golden: wire.Acceptance(rule, factor * _between(golden.probs[0]))


def _typical_cap(factor: float) -> Setting:
    def setting(golden: GoldenDistribution) -> wire.Acceptance:
        cap = factor * _between(math.exp(golden.log_probs[0]))
        return wire.Acceptance("typical", 1.0, posterior_threshold=cap, posterior_alpha=UNREACHED)

    return setting


def _typical_slope(factor: float) -> Setting:
    def setting(golden: GoldenDistribution) -> wire.Acceptance:
        slope = factor * _between(math.exp(golden.log_probs[0])) * math.exp(golden.entropies[0])
        return wire.Acceptance("typical", 1.0, posterior_threshold=1.0, posterior_alpha=slope)

    return setting


def _between(value: float) -> float:
    return min(max(value, LEAST), MOST)


def read_verdict(evidence: wire.Evidence, settings: wire.Acceptance, stop_ids: Collection[int], room: int) -> Verdict:
    """What a correct server replies to a round that was judged by this evidence.

    Args:
        settings: of the session, without `stop_needs_draw`.
        room: tokens that the session may still get.
    """
    best: tuple[int, int, float, int] = (0, 0, 0.0, 1)  # depth, draws, log p~, minus the row: the root has row -1
    reached: dict[int, tuple[tuple[int, int, float, int], list[int]]] = {-1: (best, [])}
    for row, parent in enumerate(evidence.parents):
        if parent not in reached or not _accepted(row, evidence, settings):
            continue
        (depth, draws, log_prob, _), path = reached[parent]
        prob = evidence.probs[row]
        log_prob += math.log(prob) if prob > 0 else -math.inf
        reached[row] = ((depth + 1, draws + _is_draw(row, evidence), log_prob, -row), [*path, row])
    _, path = max(reached.values(), key=lambda each: each[0])
    bonus = evidence.draws[path[-1] + 1 if path else 0]
    tokens: list[int] = []
    finished = ""
    for token in [*(evidence.tokens[row] for row in path), bonus]:
        tokens.append(token)
        finished = "stop" if token in stop_ids else "length" if len(tokens) == room else ""
        if finished:
            break
    path = path[: len(tokens)]
    return Verdict(path, [_is_draw(row, evidence) for row in path], tokens, finished)


def _is_draw(row: int, evidence: wire.Evidence) -> bool:
    return evidence.tokens[row] == evidence.draws[evidence.parents[row] + 1]


def _accepted(row: int, evidence: wire.Evidence, settings: wire.Acceptance) -> bool:
    """Does the rule accept this child of an accepted node?"""
    if _is_draw(row, evidence):
        return True
    parent = evidence.parents[row]
    if settings.rule == "typical":
        limit = min(settings.posterior_threshold, settings.posterior_alpha * math.exp(-evidence.entropies[parent + 1]))
        return evidence.raw_probs[row] > limit
    if settings.rule == "exact" or (settings.rule == "epsilon-at-rejections" and _has_drawn_child(parent, evidence)):
        return False
    return bool(np.float32(evidence.probs[row]) >= np.float32(settings.epsilon))


def _has_drawn_child(parent: int, evidence: wire.Evidence) -> bool:
    siblings: Sequence[int] = [row for row, above in enumerate(evidence.parents) if above == parent]
    return any(_is_draw(row, evidence) for row in siblings)
