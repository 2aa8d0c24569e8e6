"""Rings of K/V rows and forests of new ones: which slot holds which position, what a row sees, rotary tables.

A ring of capacity W keeps the row of position p in slot p mod W. Keys already carry their rotary embedding, so the
order of slots has no meaning (HyCo, Appendix A). Rotary tables come from the host: the graph only multiplies and adds.
Pure numpy.
"""

from collections.abc import Sequence

import numpy as np

EMPTY = -1  # position of a slot that holds nothing
NO_PARENT = -1  # of a row right behind the newest committed position


def slots(first_position: int, count: int, capacity: int) -> np.ndarray:
    """Slots [count] of the positions first_position .. first_position + count - 1."""
    return np.arange(first_position, first_position + count) % capacity


def slot_positions(length: int, capacity: int) -> np.ndarray:
    """Position stored in each slot [capacity] after positions 0 .. length-1 were written in order; EMPTY if none."""
    last = length - 1
    slot = np.arange(capacity)
    positions = last - (last - slot) % capacity
    return np.where(positions < 0, EMPTY, positions)


def held_positions(first: int, length: int, capacity: int) -> np.ndarray:
    """Position in each slot [capacity] after `first` .. length - 1 were written in order; EMPTY where there is none."""
    positions = slot_positions(length, capacity)
    return np.where(positions < first, EMPTY, positions)


def ancestor_mask(parents: Sequence[int]) -> np.ndarray:
    """bool [R, R] of a forest whose parents stand before their children: is column j row i or one of its ancestors."""
    mask = np.eye(len(parents), dtype=bool)
    for row, parent in enumerate(parents):
        if parent != NO_PARENT:
            mask[row] |= mask[parent]
    return mask


def visible(query_positions: np.ndarray, key_positions: np.ndarray, span: int | None) -> np.ndarray:
    """Whether a query may see a key: bool [R, C] for query_positions [R] and key_positions [C].

    A key is visible when it exists, is not after the query, and (with `span`) lies among the `span` newest positions
    counted from the query itself: query - key < span. transformers' Gemma 4 verifier and SLM use span = window. Its
    assistant sees the newest window + 1 keys before the root: with the root as the query, span = window + 2.
    """
    distance = query_positions[:, None] - key_positions[None, :]
    seen: np.ndarray = (key_positions[None, :] != EMPTY) & (distance >= 0)
    return seen if span is None else seen & (distance < span)


def ring_span(span: int | None, capacity: int) -> int:
    """`span` of a query right after the newest key of a ring: the query itself, then at most `capacity` keys."""
    return capacity + 1 if span is None else min(span, capacity + 1)


def rotary_tables(positions: np.ndarray, inv_freq: Sequence[float]) -> tuple[np.ndarray, np.ndarray]:
    """cos and sin, float32 [R, d], of positions [R] for frequencies [d/2] (0 where a pair does not rotate).

    Follows transformers' `Gemma4TextRotaryEmbedding` in float32, except for the sign of rotate-half, (-x2, x1): it is
    folded into the first half of sin, so that the graph swaps the halves and never negates.
    """
    angles = positions.astype(np.float32)[:, None] * np.asarray(inv_freq, np.float32)[None, :]  # [R, d/2]
    cos, sin = np.cos(angles), np.sin(angles)
    return np.concatenate([cos, cos], axis=1), np.concatenate([-sin, sin], axis=1)
