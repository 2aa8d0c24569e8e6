"""Which side of the verifier's final norm h comes from, and which side the head expects.

Values show the first: after an RMS norm every state divided by the norm's weight has a root mean square of 1. The
original head's predictions show the second: with h from the wrong side it misses the verifier's tokens more often (how
much more depends on the head).

Legend: n states, H the verifier's hidden size.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hyco_export.core.handoff import HiddenNorm
from hyco_export.errors import GateError
from hyco_export.models.families.gemma4_assistant import HeadModel
from hyco_export.models.head.unroll import FinalNorm, RootRows, unroll

RMS_TOLERANCE = 0.02  # bfloat16 keeps 8 bits: values are off by 2^-9, their mean square by less
SHARE_ON_ONE_SIDE = 0.99  # a few states may be so small that the norm's epsilon changes them
CLEAR_SIGMAS = 4.0  # of the sign test: by chance once in 30,000
CLEAR_SHARE = 0.05  # of the tokens: a smaller difference is no reason to refuse
OTHER: dict[HiddenNorm, HiddenNorm] = {"pre": "post", "post": "pre"}
SIDES: dict[HiddenNorm, str] = {"pre": "before", "post": "after"}


def side_of(states: torch.Tensor, norm: FinalNorm) -> HiddenNorm:
    """The side of the norm that states [n, H] come from, by the channels where its weight is not 0."""
    used = norm.weight != 0
    rms = (states.float()[:, used] / norm.weight[used]).square().mean(dim=-1).sqrt()  # [n]
    return "post" if ((rms - 1.0).abs() < RMS_TOLERANCE).float().mean() >= SHARE_ON_ONE_SIDE else "pre"


def require_side(states: torch.Tensor, norm: FinalNorm, wanted: HiddenNorm) -> None:
    """Refuse states from another side than the recipe names.

    Raises:
        GateError: they come from the other side.
    """
    found = side_of(states, norm)
    if found != wanted:
        raise GateError(
            f"the captured states come from {SIDES[found]} the verifier's final norm, $.models.hidden_norm is {wanted}",
            f"set $.models.hidden_norm: {found}, or capture again with a verifier that transformers provides",
        )


@dataclass(frozen=True)
class Readings:
    """How well a head predicts with h from the side that the recipe names, and from the other one.

    Attributes:
        own, other: share of response tokens that its best token equals.
        sigmas: of the sign test over the tokens that only one of them predicts; positive where `other` is better.
    """

    own: float
    other: float
    sigmas: float


@torch.no_grad()
def compare_readings(head: HeadModel, own: Sequence[RootRows], other: Sequence[RootRows]) -> Readings:
    """Compare depth 1 on the same sequences, read in both ways."""
    pairs = [(_hits(head, left), _hits(head, right)) for left, right in zip(own, other, strict=True)]
    left, right = (torch.cat(hits) for hits in zip(*pairs, strict=True))  # bool [tokens]
    lost, won = int((left & ~right).sum()), int((right & ~left).sum())
    sigmas = (won - lost) / math.sqrt(max(1, won + lost))
    return Readings(float(left.float().mean()), float(right.float().mean()), sigmas)


def _hits(head: HeadModel, rows: RootRows) -> torch.Tensor:
    logits = unroll(head, rows, 1)[0]
    return logits.argmax(dim=-1).cpu() == rows.answers


def require_reading(readings: Readings, hidden_norm: HiddenNorm) -> None:
    """Refuse a head that predicts clearly better with h from the other side.

    Raises:
        GateError: it does; names both shares.
    """
    if readings.sigmas < CLEAR_SIGMAS or readings.other - readings.own < CLEAR_SHARE:
        return
    other = OTHER[hidden_norm]
    raise GateError(
        f"the original head predicts {readings.own:.1%} of the verifier's tokens reading h as $.models.hidden_norm: "
        f"{hidden_norm} says, and {readings.other:.1%} reading it as {other}: head and hand-off are on different sides "
        "of the verifier's final norm",
        f"set $.models.hidden_norm: {other}, or use the head that was published for this verifier",
    )
