"""The verdict of a round: from the verify pass's logits to the tokens that are committed. Pure numpy.

`look` draws one token per row, `decide` applies the session's acceptance rule, `settle` cuts the accepted path at the
first stop id or the token cap. A rule decides which edges of the tree are acceptable; choosing among the open paths is
common to all rules (`_commit_best`). `RULES` lists the rules with what they read and their options: a new rule is one
function and one row there.

Legend: N nodes of the tree, V vocabulary. Row 0 is the root, row i + 1 node i; draws[r] ~ p~[r], the distribution after
temperature, top-k and top-p (`sampling`).
"""

import math
from collections.abc import Callable, Collection, Sequence
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np

from hyco_export.errors import ProtocolError
from hyco_export.protocol import sampling, wire
from hyco_export.protocol.refusals import shown
from hyco_export.protocol.tree import ROOT, depths

Finished = Literal["", "stop", "length"]


class Verdict(msgspec.Struct, frozen=True):
    """The accepted path and the token after it.

    `accepted` are tree rows from depth 1 down; `drawn[i]` is True where accepted row i equals the verifier's own draw;
    `bonus` is the draw at the path's end.
    """

    accepted: tuple[int, ...]
    drawn: tuple[bool, ...]
    bonus: int


NO_VALUES = np.zeros(0)


class Judged(msgspec.Struct, frozen=True):
    """A round as the verifier saw it.

    tokens [N], parents [N], draws [N + 1]; probs [N] float32 = p~(token | parent); raw_probs [N] and entropies [N + 1]
    float64: p(token | parent) and H(p) in nats of p = softmax(logits / T). Arrays that nothing reads are empty.
    """

    tokens: Sequence[int]
    parents: Sequence[int]
    draws: Sequence[int]
    probs: np.ndarray = NO_VALUES
    raw_probs: np.ndarray = NO_VALUES
    entropies: np.ndarray = NO_VALUES

    @classmethod
    def of(cls, evidence: wire.Evidence) -> "Judged":
        """A round from its logged evidence, every value unchanged."""
        return cls(
            tuple(evidence.tokens),
            tuple(evidence.parents),
            tuple(evidence.draws),
            np.asarray(evidence.probs, np.float32),
            np.asarray(evidence.raw_probs, np.float64),
            np.asarray(evidence.entropies, np.float64),
        )

    def evidence(self) -> wire.Evidence:
        """The same as a wire message."""
        return wire.Evidence(
            list(self.tokens),
            list(self.parents),
            list(self.draws),
            self.probs.tolist(),
            self.raw_probs.tolist(),
            self.entropies.tolist(),
        )


class Query(NamedTuple):
    """What is asked of the logits of a root and its tree: the draws, and what a rule `reads` (`Rule`).

    logits: [N + 1, V] of the root, at absolute position `root_position`, and of tokens [N] with parents [N], wherever
    the verifier keeps them. A row's draw is keyed by `seed`, the row's position and the row's number.
    """

    logits: Any
    tokens: Sequence[int]
    parents: Sequence[int]
    root_position: int
    sampling: wire.Sampling
    seed: int
    reads: frozenset[str] = frozenset()

    @property
    def rows(self) -> int:
        """N + 1."""
        return 1 + len(self.tokens)

    @property
    def positions(self) -> np.ndarray:
        """Absolute positions [N + 1]."""
        positions: np.ndarray = self.root_position + np.concatenate([[0], depths(self.parents)])
        return positions


def exact(seen: Judged) -> Verdict:
    """From the root, move to the child that equals the current row's draw, as long as there is one.

    Lossless for any tree without duplicate siblings: every committed token is the verifier's own draw at its true
    context.
    """
    child = {edge: row for row, edge in enumerate(zip(seen.parents, seen.tokens, strict=True))}
    path: list[int] = []
    row = ROOT
    while (following := child.get((row, seen.draws[row + 1]))) is not None:
        path.append(following)
        row = following
    return Verdict(tuple(path), (True,) * len(path), int(seen.draws[row + 1]))


def epsilon(seen: Judged, threshold: float, draw_only: Collection[int] = ()) -> Verdict:
    """A child is acceptable at every node if it equals the draw there or p~(child | parent) >= threshold.

    A threshold of 1 gives `exact`. Tokens in `draw_only` are acceptable as draws alone.
    """
    return _commit_best(seen, _matches(seen), _likely(seen.probs, threshold), draw_only)


def epsilon_at_rejections(seen: Judged, threshold: float, draw_only: Collection[int] = ()) -> Verdict:
    """`epsilon`, but only below nodes whose draw no child equals; elsewhere that child alone is acceptable.

    A reading of HyCo, §3.5 ("at every node rather than only at rejections").
    """
    matches = _matches(seen)
    settled = {parent for parent, match in zip(seen.parents, matches, strict=True) if match}
    enough = _likely(seen.probs, threshold)
    likely = [reached and parent not in settled for reached, parent in zip(enough, seen.parents, strict=True)]
    return _commit_best(seen, matches, likely, draw_only)


def typical(seen: Judged, cap: float, slope: float, draw_only: Collection[int] = ()) -> Verdict:
    """Medusa's typical acceptance: the draw, or p(child | parent) > min(cap, slope * exp(-H(p))).

    p is the softmax of the logits at the temperature, without top-k and top-p (Cai et al. 2024). The path is chosen by
    p~, as everywhere; a token that p~ has cut counts as log p~ = -inf there.
    """
    limits = np.minimum(cap, slope * np.exp(-seen.entropies))  # [N + 1]
    likely: list[bool] = (seen.raw_probs > limits[np.asarray(seen.parents, np.int64) + 1]).tolist()
    return _commit_best(seen, _matches(seen), likely, draw_only)


def _likely(probs: np.ndarray, threshold: float) -> list[bool]:
    if not 0.0 < threshold <= 1.0:
        raise ValueError(f"epsilon is {threshold}, it must lie in (0, 1]")
    likely: list[bool] = (probs >= np.float32(threshold)).tolist()  # in float32, the precision of p~
    return likely


def _matches(seen: Judged) -> list[bool]:
    """[N]: whether node i equals the draw at its parent."""
    return [token == seen.draws[parent + 1] for token, parent in zip(seen.tokens, seen.parents, strict=True)]


def _commit_best(seen: Judged, matches: Sequence[bool], likely: Sequence[bool], draw_only: Collection[int]) -> Verdict:
    """The best node reachable through acceptable edges, and the draw there.

    An edge is acceptable if it equals the draw, or is likely and not in `draw_only`. Best: largest depth, then most
    edges that equal the draw, then largest sum of log p~, then smallest row.
    """
    ranks: dict[int, tuple[int, int, float, int]] = {ROOT: (0, 0, 0.0, -ROOT)}
    paths: dict[int, tuple[int, ...]] = {ROOT: ()}
    for row, parent in enumerate(seen.parents):
        acceptable = matches[row] or (likely[row] and seen.tokens[row] not in draw_only)
        if acceptable and parent in ranks:
            depth, drawn, log_prob, _ = ranks[parent]
            log_p = math.log(seen.probs[row]) if seen.probs[row] > 0 else -math.inf
            ranks[row] = (depth + 1, drawn + matches[row], log_prob + log_p, -row)
            paths[row] = (*paths[parent], row)
    end = max(ranks, key=ranks.__getitem__)
    # a child that equals the draw is acceptable and deeper: it would have been the end
    assert not any(matches[row] for row, parent in enumerate(seen.parents) if parent == end)
    return Verdict(paths[end], tuple(bool(matches[row]) for row in paths[end]), int(seen.draws[end + 1]))


PROBS, RAW = "probs", "raw"  # what a rule may read beside tokens and draws
EVERYTHING = frozenset({PROBS, RAW})
EPSILON, STOP_NEEDS_DRAW = "epsilon", "stop_needs_draw"  # options, named as the fields of `wire.Acceptance`
POSTERIOR_THRESHOLD, POSTERIOR_ALPHA = "posterior_threshold", "posterior_alpha"


class Rule(msgspec.Struct, frozen=True):
    """One acceptance rule.

    `decide` takes the round, the settings and the tokens that only a draw may accept; `reads` names the arrays of
    `Judged` it needs, `options` the fields of `wire.Acceptance` it takes.
    """

    name: str
    summary: str
    decide: Callable[[Judged, wire.Acceptance, frozenset[int]], Verdict]
    reads: frozenset[str] = frozenset()
    options: frozenset[str] = frozenset()


RULES: dict[str, Rule] = {
    rule.name: rule
    for rule in (
        Rule("exact", "a child equals the draw", lambda seen, _, __: exact(seen)),
        Rule(
            "epsilon",
            "or its probability reaches epsilon",
            lambda seen, settings, draw_only: epsilon(seen, settings.epsilon, draw_only),
            frozenset({PROBS}),
            frozenset({EPSILON, STOP_NEEDS_DRAW}),
        ),
        Rule(
            "epsilon-at-rejections",
            "or it reaches epsilon where no child equals the draw",
            lambda seen, settings, draw_only: epsilon_at_rejections(seen, settings.epsilon, draw_only),
            frozenset({PROBS}),
            frozenset({EPSILON, STOP_NEEDS_DRAW}),
        ),
        Rule(
            "typical",
            "or its probability before the cuts passes Medusa's entropy-dependent threshold",
            lambda seen, settings, draw_only: typical(
                seen, settings.posterior_threshold, settings.posterior_alpha, draw_only
            ),
            frozenset({PROBS, RAW}),
            frozenset({POSTERIOR_THRESHOLD, POSTERIOR_ALPHA, STOP_NEEDS_DRAW}),
        ),
    )
}


def check_acceptance(settings: wire.Acceptance) -> None:
    """Check a session's acceptance settings: known rule, no option set that the rule ignores, values in range.

    Raises:
        ProtocolError: codes value_range, unsupported.
    """
    if settings.rule not in RULES:
        raise ProtocolError(
            "unsupported", f"acceptance.rule is {shown(settings.rule)}", f"known ones: {', '.join(RULES)}"
        )
    reads = RULES[settings.rule].options
    for option in wire.Acceptance.__struct_fields__:
        value = getattr(settings, option)
        if option not in reads | {"rule"} and value != getattr(wire.EXACT, option):
            raise ProtocolError(
                "unsupported",
                f"acceptance.{option} is {value}, but the rule {settings.rule} does not read it",
                f"leave it at {getattr(wire.EXACT, option)}, or choose another rule",
            )
    for option in (EPSILON, POSTERIOR_THRESHOLD):
        value = getattr(settings, option)
        if not 0.0 < value <= 1.0:
            raise ProtocolError("value_range", f"acceptance.{option} is {value}, it must lie in (0, 1]")
    if not (math.isfinite(settings.posterior_alpha) and settings.posterior_alpha > 0):
        value = settings.posterior_alpha
        raise ProtocolError("value_range", f"acceptance.posterior_alpha is {value}, it must be finite and above 0")


def decide(judged: Judged, settings: wire.Acceptance, stop_ids: frozenset[int]) -> Verdict:
    """The verdict of the settings' rule on a round."""
    return RULES[settings.rule].decide(judged, settings, stop_ids if settings.stop_needs_draw else frozenset())


def look(query: Query) -> Judged:
    """The round from logits in an array [N + 1, V] float32, with the arrays that the rule reads.

    Raises:
        ValueError: a row of the logits is not finite.
    """
    positions = query.positions
    support = sampling.sampling_support(query.logits, query.sampling)
    drawn = sampling.draws(support, query.seed, positions)
    tokens, parents = query.tokens, query.parents
    probs = sampling.node_probabilities(support, tokens, parents) if PROBS in query.reads else NO_VALUES
    raw, entropies = NO_VALUES, NO_VALUES
    if RAW in query.reads:
        raw, entropies = sampling.raw_distribution(query.logits, query.sampling.temperature, tokens, parents)
    return Judged(tuple(tokens), tuple(parents), tuple(drawn.tolist()), probs, raw, entropies)


class Outcome(msgspec.Struct, frozen=True):
    """What a round commits: `tokens` are the accepted rows' tokens and, unless the path was cut, the bonus."""

    accepted: tuple[int, ...]
    drawn: tuple[bool, ...]
    tokens: tuple[int, ...]
    finished: Finished


def settle(verdict: Verdict, tokens: Sequence[int], stop_ids: frozenset[int], room: int) -> Outcome:
    """The verdict cut at the first stop id, then at `room` tokens (>= 1)."""
    committed = [*(int(tokens[row]) for row in verdict.accepted), verdict.bonus]
    finished = finish_reason(committed, stop_ids, room)
    kept = cut_length(committed, stop_ids, room)
    return Outcome(verdict.accepted[:kept], verdict.drawn[:kept], tuple(committed[:kept]), finished)


def cut_length(committed: Sequence[int], stop_ids: Collection[int], room: int) -> int:
    """How many of these tokens are committed: up to the first stop id, at most `room`."""
    stop = next((index for index, token in enumerate(committed) if token in stop_ids), len(committed))
    return min(len(committed), stop + 1, room)


def finish_reason(committed: Sequence[int], stop_ids: frozenset[int], room: int) -> Finished:
    """Why generation ends with these tokens: a stop id among the first `room`, `room` used up, or not at all."""
    if not stop_ids.isdisjoint(committed[:room]):
        return "stop"
    return "length" if len(committed) >= room else ""
