"""One finding of a diagnosis: which fault, where, what was seen, and the next step.

Drafting from wrong inputs raises no error and gives right text: only acceptance falls. Every fault that was seen to
do that has a name here.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

import msgspec
import numpy as np

Fault = Literal[
    "norm side",
    "scale",
    "keep set",
    "tokenizer",
    "head",
    "verifier",
    "K/V rows",
    "sliding window",
    "positions",
    "weights",
    "soft-cap",
    "logits",
    "sampling",
    "verdict",
    "hand-off",
    "acceptance",
]

MEANINGS: dict[Fault, str] = {
    "norm side": "h comes from the other side of the verifier's final norm than the head artifact says",
    "scale": "a tensor is written with one scale and read with another",
    "keep set": "kept rows stand for other tokens than the keep set says",
    "tokenizer": "texts become other ids than those the artifacts were built with",
    "head": "the head belongs to another verifier, or its weights to another head",
    "verifier": "the server's weights are not those of the verifier that the artifacts were built from",
    "K/V rows": "K/V rows stand at other positions than they belong to",
    "sliding window": "sliding layers see another number of positions than the checkpoint says",
    "positions": "rotary positions are not those of the tokens",
    "weights": "weights of a graph are not those they were made from",
    "soft-cap": "logits are not bounded as the verifier's config says: every probability is another",
    "logits": "logits have the right order and wrong values: every probability is another",
    "sampling": "temperature, cuts or draws are not those that were asked for",
    "verdict": "a round accepts other tokens than its rule and its own draws and probabilities say",
    "hand-off": "a hand-off is not what the protocol says",
    "acceptance": "drafts are taken less often than when the artifact was built",
}


class Finding(msgspec.Struct, frozen=True):
    """`where`: the part that is wrong. `seen`: figures. `next`: what to do."""

    fault: Fault
    where: str
    seen: str
    next: str

    @property
    def means(self) -> str:
        return MEANINGS[self.fault]

    def __str__(self) -> str:
        return f"{self.fault}, {self.where}: {self.seen}; {self.means}. Next: {self.next}"


class Diagnosis(msgspec.Struct, frozen=True):
    """All findings at the golden positions. `acceptance` of the device's chain by depth, at `positions` roots;
    `expected_acceptance` as stored in the head artifact."""

    positions: int
    expected_acceptance: tuple[float, ...]
    acceptance: tuple[float, ...]
    findings: tuple[Finding, ...]
    notes: tuple[str, ...] = ()


def merged(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """The first finding of each fault at each place, in order of appearance."""
    found: dict[tuple[Fault, str], Finding] = {}
    for finding in findings:
        found.setdefault((finding.fault, finding.where), finding)
    return tuple(found.values())


SHOWN = 3  # examples in a message


@dataclass(frozen=True)
class Displaced:
    """Of n rows `differing` are not what they should be; `owners` tells for those that belong to another token, which:
    (token the row stands for, token it belongs to)."""

    rows: int
    differing: int
    owners: tuple[tuple[int, int], ...]

    @property
    def permuted(self) -> bool:
        """Are most of the wrong rows right ones of other tokens?"""
        return len(self.owners) * 2 > self.differing

    @property
    def text(self) -> str:
        examples = ", ".join(f"{wanted} holds that of {owner}" for wanted, owner in self.owners[:SHOWN])
        return f"{self.differing} of {self.rows} rows stand for other tokens: the row of token {examples}"


def displaced(
    found: np.ndarray,
    wanted: np.ndarray,
    ids: np.ndarray,
    whole: Callable[[], Iterable[tuple[int, np.ndarray]]],
) -> Displaced | None:
    """None where found [n, D] equals wanted [n, D], the rows of tokens `ids` [n].

    `whole` gives (token, row) of all tokens that a row can belong to; it is asked only where rows differ.
    """
    differing = np.flatnonzero((found != wanted).any(axis=1))
    if not len(differing):
        return None
    owner: dict[bytes, int] = {}
    for token, row in whole():
        owner.setdefault(row.tobytes(), token)
    places = ((int(ids[row]), owner.get(found[row].tobytes())) for row in differing)
    return Displaced(len(found), len(differing), tuple((want, got) for want, got in places if got is not None))
