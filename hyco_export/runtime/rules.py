"""The acceptance rules by name: what each reads of a round, and which options it takes. A new rule is one row.

Knows `acceptance` and the settings that travel; no logits and no sessions.
"""

import math
from collections.abc import Callable

import msgspec
import numpy as np

from hyco_export.errors import ProtocolError
from hyco_export.runtime import acceptance, wire
from hyco_export.runtime.acceptance import Verdict

PROBS, RAW = "probs", "raw"  # what a rule may read beside tokens and draws
EVERYTHING = frozenset({PROBS, RAW})
EPSILON, STOP_NEEDS_DRAW = "epsilon", "stop_needs_draw"  # options, by the names of wire.Acceptance's fields
POSTERIOR_THRESHOLD, POSTERIOR_ALPHA = "posterior_threshold", "posterior_alpha"
NO_VALUES = np.zeros(0)
SHOWN_CHARACTERS = 40


class Judged(msgspec.Struct, frozen=True):
    """A round as the verifier saw it: N nodes; row 0 of the rows is the root, row i + 1 node i.

    tokens [N], parents [N], draws [N + 1]; probs [N] float32 = p~(token | parent); raw_probs [N] and entropies [N + 1]
    float64: p(token | parent) and H(p) in nats of p = softmax(logits / T). Values that nobody reads may be left out.
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    draws: tuple[int, ...]
    probs: np.ndarray = NO_VALUES
    raw_probs: np.ndarray = NO_VALUES
    entropies: np.ndarray = NO_VALUES

    @classmethod
    def of(cls, evidence: wire.Evidence) -> "Judged":
        """A round as it was logged; every value comes back as it was."""
        return cls(
            tuple(evidence.tokens),
            tuple(evidence.parents),
            tuple(evidence.draws),
            np.asarray(evidence.probs, np.float32),
            np.asarray(evidence.raw_probs, np.float64),
            np.asarray(evidence.entropies, np.float64),
        )

    def evidence(self) -> wire.Evidence:
        """The same as it travels."""
        return wire.Evidence(
            list(self.tokens),
            list(self.parents),
            list(self.draws),
            self.probs.tolist(),
            self.raw_probs.tolist(),
            self.entropies.tolist(),
        )


Decide = Callable[[Judged, wire.Acceptance, frozenset[int]], Verdict]


class Rule(msgspec.Struct, frozen=True):
    """`decide` gets the round, the settings, and the tokens that only a draw may accept."""

    name: str
    summary: str
    decide: Decide
    reads: frozenset[str] = frozenset()
    options: frozenset[str] = frozenset()


def _exact(judged: Judged, _: wire.Acceptance, __: frozenset[int]) -> Verdict:
    return acceptance.exact(judged.tokens, judged.parents, judged.draws)


def _epsilon(judged: Judged, settings: wire.Acceptance, draw_only: frozenset[int]) -> Verdict:
    return acceptance.epsilon(judged.tokens, judged.parents, judged.draws, judged.probs, settings.epsilon, draw_only)


def _epsilon_at_rejections(judged: Judged, settings: wire.Acceptance, draw_only: frozenset[int]) -> Verdict:
    return acceptance.epsilon_at_rejections(
        judged.tokens, judged.parents, judged.draws, judged.probs, settings.epsilon, draw_only
    )


def _typical(judged: Judged, settings: wire.Acceptance, draw_only: frozenset[int]) -> Verdict:
    return acceptance.typical(
        judged.tokens,
        judged.parents,
        judged.draws,
        judged.probs,
        judged.raw_probs,
        judged.entropies,
        settings.posterior_threshold,
        settings.posterior_alpha,
        draw_only,
    )


RULES: dict[str, Rule] = {
    rule.name: rule
    for rule in (
        Rule("exact", "a child equals the draw", _exact),
        Rule(
            "epsilon",
            "or its probability reaches epsilon",
            _epsilon,
            frozenset({PROBS}),
            frozenset({EPSILON, STOP_NEEDS_DRAW}),
        ),
        Rule(
            "epsilon-at-rejections",
            "or it reaches epsilon where no child equals the draw",
            _epsilon_at_rejections,
            frozenset({PROBS}),
            frozenset({EPSILON, STOP_NEEDS_DRAW}),
        ),
        Rule(
            "typical",
            "or its probability before the cuts passes Medusa's entropy-dependent threshold",
            _typical,
            frozenset({PROBS, RAW}),
            frozenset({POSTERIOR_THRESHOLD, POSTERIOR_ALPHA, STOP_NEEDS_DRAW}),
        ),
    )
}


def shown(word: str) -> str:
    """A word that a caller made up, as a refusal repeats it: not at any length."""
    return repr(word[:SHOWN_CHARACTERS])


def check_acceptance(settings: wire.Acceptance) -> None:
    """Refuse an unknown rule, then any value of an option that the rule ignores, then values out of range.

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
