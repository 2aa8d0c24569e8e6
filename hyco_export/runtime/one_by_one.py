"""ports.VerifierModels for sessions that share nothing: each computes its part by itself. Knows no models."""

from collections.abc import Sequence

import numpy as np

from hyco_export.runtime.ports import Chain, Check, Prefill


class OneByOne:
    """A pass is one call after the other.

    Args:
        position_bytes: memory that a session takes for each of its positions.
    """

    def __init__(self, position_bytes: int = 0) -> None:
        self._position_bytes = position_bytes

    def cache_bytes(self, positions: int) -> int:
        return positions * self._position_bytes

    def draft(self, chains: Sequence[Chain]) -> list[tuple[int, ...]]:
        return [chain.session.draft(chain.root, chain.steps, chain.restricted) for chain in chains]

    def forward(self, parts: Sequence[Prefill | Check]) -> list[np.ndarray]:
        return [
            part.session.prime(part.ids)
            if isinstance(part, Prefill)
            else part.session.verify(part.root, part.tokens, part.parents).logits
            for part in parts
        ]
