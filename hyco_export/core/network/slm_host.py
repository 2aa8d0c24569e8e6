"""The host's part of an SLM pass in real numbers: embeddings, rotary tables, masks, and the K/V rings between passes.

Serves calibration and parity, where the network is float or its integers are compared with float; the device's own host
works on the rings' bytes (`runtime.devices`). Pure numpy; runs any pass through one callable.

Legend: R rows of a pass, n tokens given (n <= R), W ring slots, N kv heads, d head dim, H hidden.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from hyco_export.core.network.slm import SlmNetwork
from hyco_export.core.ring import EMPTY, slot_positions, slots, visible
from hyco_export.core.rotary import rotary_tables

Real = Mapping[str, np.ndarray]
Run = Callable[[Real], Real]  # one pass: real inputs -> real outputs, by name
Ids = Sequence[int] | np.ndarray
NO_PARENT = -1  # the row is a child of the newest committed position
PADDING_TOKEN = 0  # rows beyond the given tokens: each sees the rings and itself, nobody sees them


class EmbeddingRows(Protocol):
    """Where embeddings come from: `core.tables.HostTables`, or arrays in tests."""

    def tokens(self, ids: np.ndarray) -> np.ndarray: ...

    def per_layer(self, ids: np.ndarray) -> np.ndarray: ...


@dataclass(frozen=True)
class Opening:
    """The token that begins every text, and its K/V rows [N, 1, d] by ring (`k.<i>`, `v.<i>`).

    They depend on nothing, so a host may keep them and never run that token. A model that parks attention there has
    activations at it that are far greater than at any other, which would take the graph's grids for themselves.
    """

    token: int
    rows: Mapping[str, np.ndarray]


class SlmHost:
    """Rings and feeds of one sequence.

    Args:
        network: shapes, rings, spans and rotary frequencies.
        embeddings: scaled embedding rows.
        rows: R.
        mask_value: what hides a key.
        start: position of the first token it will be given; earlier positions do not exist for it.
        opening: kept rows of position 0; the first token given is then the one after (`start` must be 0).
    """

    def __init__(
        self,
        network: SlmNetwork,
        embeddings: EmbeddingRows,
        rows: int,
        mask_value: float,
        start: int = 0,
        opening: Opening | None = None,
    ) -> None:
        self.network = network
        self.rows = rows
        self.length = start
        self._start = start
        self._embeddings = embeddings
        self._mask_value = mask_value
        self._rings = {
            f"{kind}.{layer.index}": np.zeros((layer.kv_heads, network.rings[layer.layer_type], layer.dim), np.float32)
            for layer in network.storing
            for kind in ("k", "v")
        }
        if opening is not None:
            for name, kept in opening.rows.items():
                self._rings[name][:, :1] = kept
            self.length += 1

    def feeds(self, tokens: Ids, parents: Sequence[int]) -> dict[str, np.ndarray]:
        """Real inputs of a pass over a forest on top of the rings; parents come before their children."""
        ids = np.full(self.rows, PADDING_TOKEN)
        ids[: len(tokens)] = tokens
        ancestors, positions = self._forest(parents)
        feeds: dict[str, np.ndarray] = {"embeds": self._embeddings.tokens(ids), **self._rings}
        if self.network.per_layer:
            feeds["per_layer"] = self._embeddings.per_layer(ids)
        for layer_type, capacity in self.network.rings.items():
            cos, sin = rotary_tables(positions, self.network.inv_freq[layer_type])
            feeds[f"cos.{layer_type}"], feeds[f"sin.{layer_type}"] = cos, sin
            feeds[f"mask.{layer_type}"] = self._mask(positions, ancestors, capacity, self.network.spans[layer_type])
        return feeds

    def commit(self, outputs: Real, rows: Sequence[int]) -> None:
        """Copy the new K/V of `rows` (a path, depth order) into the rings at the next positions."""
        for layer in self.network.storing:
            capacity = self.network.rings[layer.layer_type]
            places = slots(self.length, len(rows), capacity)
            for kind in ("k", "v"):
                self._rings[f"{kind}.{layer.index}"][:, places] = outputs[f"{kind}_new.{layer.index}"][:, list(rows)]
        self.length += len(rows)

    def append(self, run: Run, tokens: Ids) -> Real:
        """One pass over at most R consecutive tokens, all committed; its outputs."""
        outputs = run(self.feeds(tokens, range(NO_PARENT, len(tokens) - 1)))
        self.commit(outputs, range(len(tokens)))
        return outputs

    def _forest(self, parents: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Ancestor-or-self matrix bool [R, R] and positions [R]; a padding row is its own root."""
        ancestors = np.eye(self.rows, dtype=bool)
        depth = np.zeros(self.rows, np.int64)
        for row, parent in enumerate(parents):
            if parent != NO_PARENT:
                ancestors[row] |= ancestors[parent]
                depth[row] = depth[parent] + 1
        return ancestors, self.length + depth

    def _mask(self, positions: np.ndarray, ancestors: np.ndarray, capacity: int, span: int | None) -> np.ndarray:
        """[R, W + R]: 0 where a row may look, the mask value elsewhere."""
        held = slot_positions(self.length, capacity)
        held = np.where(held < self._start, EMPTY, held)
        seen = np.concatenate([visible(positions, held, span), ancestors & visible(positions, positions, span)], axis=1)
        return np.where(seen, 0.0, self._mask_value).astype(np.float32)
