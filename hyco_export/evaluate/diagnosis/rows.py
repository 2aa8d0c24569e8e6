"""Rows that stand where others should: whose are they? Tells permuted rows from altered ones. Pure numpy.

Legend: n rows, V rows of the whole vocabulary, D values of a row.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

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
