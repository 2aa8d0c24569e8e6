"""The verifier's K/V of one session, in slots of its own: position p of a layer lies in slot p, at full length.

A forward pass writes its rows behind the committed ones; keeping a path means moving a few rows, never the context.
transformers' Gemma 4 takes it as its `cache`: it calls `update` once per layer that computes K/V. Knows no tokens and
no trees.

Legend: L committed positions, R rows of a pass, N K/V heads, d head dimension, C slots.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedConfig

from hyco_export.core.handoff import KvShape
from hyco_export.nn.verifier import layer_kv_shape

BLOCK = 256  # slots are allocated in multiples of this
GROWTH = 1.5  # a full cache grows by half: positions are copied about twice in a session's life
K, V = 0, 1
REUSES_KV = "reuse"  # transformers' mode of a layer that reads another layer's K/V


@dataclass(frozen=True)
class CacheLayout:
    """Which layers have K/V of their own, grouped by equal shape.

    `groups` are (shape, window) pairs, window None for full attention; `places` maps a layer to (group, row in it).
    """

    groups: tuple[tuple[KvShape, int | None], ...]
    places: dict[int, tuple[int, int]]

    def group_size(self, group: int) -> int:
        return sum(1 for owner, _ in self.places.values() if owner == group)


def cache_layout(config: PreTrainedConfig) -> CacheLayout:
    """The layout of a Gemma 4 verifier's cache."""
    text = config.get_text_config()
    groups: list[tuple[KvShape, int | None]] = []
    places: dict[int, tuple[int, int]] = {}
    for index, mode in enumerate(text.kv_sharing_modes):
        if mode == REUSES_KV:
            continue
        window = text.sliding_window if text.layer_types[index] == "sliding_attention" else None
        key = (layer_kv_shape(text, index), window)
        if key not in groups:
            groups.append(key)
        group = groups.index(key)
        places[index] = (group, sum(1 for owner, _ in places.values() if owner == group))
    return CacheLayout(tuple(groups), places)


class SlotCache:
    """One session's K/V.

    Sliding layers are given only what the oldest row of a pass can see: the window - 1 positions before L.
    """

    is_compileable = False  # transformers asks; a cache that grows is not

    def __init__(self, layout: CacheLayout) -> None:
        self.length = 0  # L
        self._layout = layout
        self._capacity = 0  # C
        self._stores: list[torch.Tensor | None] = [None] * len(layout.groups)  # [layers, 2, N, C, d]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.length

    def first_visible(self, window: int | None) -> int:
        """Oldest position that a row at position L can see."""
        return 0 if window is None else max(0, self.length - window + 1)

    def reserve(self, rows: int) -> None:
        """Make room for a pass of R rows."""
        if self.length + rows <= self._capacity:
            return
        wanted = max(self.length + rows, int(self._capacity * GROWTH))
        self._capacity = -(-wanted // BLOCK) * BLOCK
        for group, store in enumerate(self._stores):
            if store is not None:
                grown = store.new_empty((*store.shape[:3], self._capacity, store.shape[4]))
                grown[:, :, :, : self.length] = store[:, :, :, : self.length]
                self._stores[group] = grown

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int, **unused: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write keys, values [1, N, R, d] behind the committed rows; what this pass sees, [1, N, visible + R, d]."""
        group, row = self._layout.places[layer_idx]
        store = self._stores[group]
        if store is None:
            _, heads, _, dim = keys.shape
            store = keys.new_empty((self._layout.group_size(group), 2, heads, self._capacity, dim))
            self._stores[group] = store
        end = self.length + keys.shape[2]
        store[row, K, :, self.length : end] = keys[0]
        store[row, V, :, self.length : end] = values[0]
        first = self.first_visible(self._layout.groups[group][1])
        return store[row, K, None, :, first:end], store[row, V, None, :, first:end]

    def keep(self, rows: Sequence[int]) -> None:
        """Commit rows of the last pass (ascending), in this order; the rest is forgotten."""
        if list(rows) != list(range(len(rows))):
            for store in self._stores:
                if store is not None:
                    index = torch.tensor([self.length + row for row in rows], device=store.device)
                    store[:, :, :, self.length : self.length + len(rows)] = store.index_select(3, index)
        self.length += len(rows)

    def committed(self, layer_idx: int, count: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of K and V [N, n, d] of a layer's newest `count` committed positions; of all without a count."""
        group, row = self._layout.places[layer_idx]
        store = self._stores[group]
        if store is None:
            raise RuntimeError(f"layer {layer_idx} has seen no pass yet")
        first = 0 if count is None else max(0, self.length - count)
        return store[row, K, :, first : self.length], store[row, V, :, first : self.length]
