"""K/V rings as the bytes that the graphs read: the host copies integers and never converts them.

Knows slots and bytes; no positions' meaning beyond their slot, no masks. A slot that was never written holds 0.0 (the
zero point): masked keys still take part in the scores before the softmax, and a 0.0 key cannot outweigh the mask.

Legend: N kv heads, W ring slots, d head dim, n new rows.
"""

import numpy as np

from hyco_export.core.graphspec import GraphSpec, TensorSpec
from hyco_export.core.ring import EMPTY, slot_positions, slots


class KvRing:
    """K and V of one layer, uint8 [N, W, d] each, in the encodings of the graph inputs `k.<name>` and `v.<name>`."""

    def __init__(self, graph: GraphSpec, name: str) -> None:
        self._specs = {f"{kind}.{name}": graph.input(f"{kind}.{name}") for kind in ("k", "v")}
        self._name = name
        self.capacity = self._specs[f"k.{name}"].shape[1]
        self.arrays = {key: _zeros(spec) for key, spec in self._specs.items()}

    def clear(self) -> None:
        """Back to 0.0 everywhere."""
        self.arrays = {key: _zeros(spec) for key, spec in self._specs.items()}

    def write(self, first_position: int, k: np.ndarray, v: np.ndarray) -> None:
        """Put k, v [N, n, d] of positions first_position ... into their slots."""
        places = slots(first_position, k.shape[1], self.capacity)  # of more than W rows numpy leaves the last W
        self.arrays[f"k.{self._name}"][:, places] = k
        self.arrays[f"v.{self._name}"][:, places] = v


def held_positions(first: int, length: int, capacity: int) -> np.ndarray:
    """Position in each slot [W] after `first` .. length - 1 were written; EMPTY where there is none."""
    positions = slot_positions(length, capacity)
    return np.where(positions < first, EMPTY, positions)


def _zeros(spec: TensorSpec) -> np.ndarray:
    zero = spec.encoding.zero_point if spec.encoding else 0
    return np.full(spec.shape, zero, spec.dtype)
