"""The verifier's K/V of one session, in slots of its own. A round moves a few rows, never the context.

A full-attention layer has a slot for every position that the session may reach. A sliding layer keeps the newest
positions that a later row or the head can see, with room for one pass behind them: when that is used up, the kept ones
move to the front, once in many rounds. All of it is allocated at once, so a session costs what `CacheLayout.size_bytes`
says from its first pass to its last. `HandoffEncoder` makes the 8-bit K/V of hand-offs on the device where the cache
lies.

Legend: L committed positions, R rows of a pass, N K/V heads, d head dimension, C slots.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedConfig

from hyco_export.core.encodings import Encoding
from hyco_export.core.handoff import LAYER_TYPES, HandoffSpec, KvShape, LayerType
from hyco_export.models.process_group import HeadShares
from hyco_export.models.verifier import layer_kv_shape
from hyco_export.protocol.wire import Handoff

UINT8_MAX = 255
REUSES_KV = "reuse"  # transformers' mode of a layer that reads another layer's K/V


@dataclass(frozen=True)
class LayerGroup:
    """Layers whose K/V have one shape and one reach.

    window: what a row sees, its own position counted; None for full attention.
    kept: newest committed positions that are held; None = all.
    """

    shape: KvShape
    window: int | None
    kept: int | None
    layers: tuple[int, ...]


@dataclass(frozen=True)
class CacheLayout:
    """Which layers have K/V of their own, and how many slots they get.

    prefill_rows, tree_rows: rows of a pass over a prompt and of one over a tree, at most.
    """

    groups: tuple[LayerGroup, ...]
    prefill_rows: int
    tree_rows: int

    def slots(self, group: LayerGroup, positions: int) -> int:
        """C of a session that commits at most this many positions."""
        every = positions + self.tree_rows  # the last tree stands behind them
        if group.kept is None:
            return every
        return min(every, group.kept + max(self.prefill_rows, self.tree_rows))

    def size_bytes(self, positions: int, value_bytes: int) -> int:
        """Memory of such a session's K/V."""
        return sum(
            len(group.layers) * 2 * group.shape.heads * group.shape.dim * self.slots(group, positions) * value_bytes
            for group in self.groups
        )


def cache_layout(
    config: PreTrainedConfig,
    prefill_rows: int,
    tree_rows: int,
    read_back: Mapping[int, int] | None = None,
    heads: HeadShares | None = None,
) -> CacheLayout:
    """The layout of a Gemma 4 verifier's cache.

    read_back: newest positions of a layer, by its index, that something beside the verifier reads.
    heads: of a sharded verifier.
    """
    text = config.get_text_config()
    layers: dict[tuple[KvShape, int | None, int | None], list[int]] = {}
    for index, mode in enumerate(text.kv_sharing_modes):
        if mode == REUSES_KV:
            continue
        window = text.sliding_window if text.layer_types[index] == "sliding_attention" else None
        kept = None if window is None else max(window - 1, (read_back or {}).get(index, 0))
        shape = layer_kv_shape(text, index)
        layers.setdefault((heads.kept(index, shape) if heads else shape, window, kept), []).append(index)
    groups = tuple(LayerGroup(*key, tuple(indices)) for key, indices in layers.items())
    return CacheLayout(groups, prefill_rows, tree_rows)


class _Store:
    """K/V of one group: slot s holds position `first` + s."""

    def __init__(self, group: LayerGroup, slots: int, dtype: torch.dtype, device: torch.device) -> None:
        self.group = group
        self.first = 0
        self.data = torch.empty(
            (len(group.layers), 2, group.shape.heads, slots, group.shape.dim), dtype=dtype, device=device
        )
        self.layers = [tuple(layer) for layer in self.data]  # K and V [N, C, d] of each: views cost time at every pass

    def make_room(self, length: int, rows: int) -> None:
        """Move what is kept to the front where `rows` more do not fit behind it."""
        if length + rows - self.first <= self.data.shape[3]:
            return
        assert self.group.kept is not None  # full-attention layers have a slot for every position
        first = length - self.group.kept
        kept = self.data[:, :, :, first - self.first : length - self.first]
        self.data[:, :, :, : self.group.kept] = kept.clone()  # the two may overlap
        self.first = first


class SlotCache:
    """One session's K/V, for at most `positions` committed ones.

    transformers' Gemma 4 takes it as its `cache` inside a `PackedCache`.
    """

    def __init__(self, layout: CacheLayout, positions: int, dtype: torch.dtype, device: torch.device) -> None:
        self.length = 0  # L
        self.layout = layout
        self._positions = positions
        self._places: dict[int, tuple[_Store, int]] = {}
        self.stores: list[_Store] = []
        for group in layout.groups:
            store = _Store(group, layout.slots(group, positions), dtype, device)
            self.stores.append(store)
            self._places |= {layer: (store, row) for row, layer in enumerate(group.layers)}

    @property
    def size_bytes(self) -> int:
        """Memory that is taken."""
        return sum(store.data.nbytes for store in self.stores)

    def first_visible(self, window: int | None) -> int:
        """Oldest position that a row at position L can see."""
        return 0 if window is None else max(0, self.length - window + 1)

    def make_room(self, rows: int) -> None:
        """Before a pass of R rows.

        Raises:
            RuntimeError: more than the session was opened for.
        """
        if rows > max(self.layout.prefill_rows, self.layout.tree_rows):
            raise RuntimeError(f"a pass of {rows} rows, the cache takes {self.layout.prefill_rows}")
        if self.length + rows > self._positions + self.layout.tree_rows:
            raise RuntimeError(f"{self.length} + {rows} rows in a cache for {self._positions} positions")
        for store in self.stores:
            store.make_room(self.length, rows)

    def update(self, keys: torch.Tensor, values: torch.Tensor, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Write keys, values [N, R, d] behind the committed rows; views of what this pass sees, [N, visible + R, d]."""
        store, row = self._places[layer]
        start = self.length - store.first
        rows = keys.shape[1]
        all_keys, all_values = store.layers[row]
        all_keys.narrow(1, start, rows).copy_(keys)
        all_values.narrow(1, start, rows).copy_(values)
        first = self.first_visible(store.group.window) - store.first
        visible = start + rows - first
        return all_keys.narrow(1, first, visible), all_values.narrow(1, first, visible)

    def keep(self, rows: Sequence[int]) -> None:
        """Commit rows of the last pass (ascending), in this order; the rest is forgotten."""
        if list(rows) != list(range(len(rows))):
            for store in self.stores:
                start = self.length - store.first
                index = torch.tensor([start + row for row in rows], device=store.data.device)
                store.data[:, :, :, start : start + len(rows)] = store.data.index_select(3, index)
        self.length += len(rows)

    def held(self, layer: int) -> int:
        """Committed positions of a layer that can be read back."""
        kept = self._places[layer][0].group.kept
        return self.length if kept is None else min(self.length, kept)

    def committed(self, layer: int, count: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of K and V [N, n, d] of a layer's newest `count` committed positions, fewer where there are not as
        many; without a count of all that are held.

        Raises:
            RuntimeError: they are not held.
        """
        wanted = self.held(layer) if count is None else min(count, self.length)
        if wanted > self.held(layer):
            raise RuntimeError(f"layer {layer} holds {self.held(layer)} positions, not {wanted}")
        store, row = self._places[layer]
        start = self.length - store.first - wanted
        keys, values = store.layers[row]
        return keys.narrow(1, start, wanted), values.narrow(1, start, wanted)


class PackedCache:
    """The caches of the sessions whose rows stand one behind the other in a pass, each with its number of rows.

    heads: of a sharded verifier.
    """

    is_compileable = False  # transformers asks

    def __init__(self, parts: Sequence[tuple[SlotCache, int]], heads: HeadShares | None = None) -> None:
        self._parts = parts
        self._heads = heads

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0  # transformers asks to derive positions, which are given

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int, **unused: object
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """keys, values [1, N, sum of R, d] -> what the rows of each session see, [N, visible + R, d] each."""
        if self._heads is not None:
            keys, values = self._heads.gathered(layer_idx, keys, values)
        if len(self._parts) == 1:
            key, value = self._visible(self._parts[0][0], keys[0], values[0], layer_idx)
            return [key], [value]
        start = 0
        seen_keys, seen_values = [], []
        for cache, rows in self._parts:
            end = start + rows
            key, value = self._visible(cache, keys[0, :, start:end], values[0, :, start:end], layer_idx)
            seen_keys.append(key)
            seen_values.append(value)
            start = end
        return seen_keys, seen_values

    def _visible(
        self, cache: SlotCache, keys: torch.Tensor, values: torch.Tensor, layer: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write one session's rows; what they see of the heads that this process computes with."""
        key, value = cache.update(keys, values, layer)
        if self._heads is None:
            return key, value
        return self._heads.computed(layer, key), self._heads.computed(layer, value)


class HandoffEncoder:
    """Quantises the values of hand-offs by one head artifact's encodings, in core.handoff's layout."""

    def __init__(self, spec: HandoffSpec) -> None:
        self.spec = spec

    def encode(
        self,
        e: torch.Tensor,
        h: torch.Tensor,
        rows: Mapping[LayerType, tuple[torch.Tensor, torch.Tensor]],
        first_position: int,
    ) -> Handoff:
        """e, h [H] and (K, V) [N, n, d] by layer type, of positions first_position ... -> the hand-off."""
        encodings = self.spec.encodings
        blocks = [
            quantize(part, encodings[f"{name}.{layer_type}"]).transpose(0, 1).flatten(1)  # [n, N * d]
            for layer_type in LAYER_TYPES
            for name, part in zip("kv", rows[layer_type], strict=True)
        ]
        return Handoff(
            e=_bytes(quantize(e, encodings["e"])),
            h=_bytes(quantize(h, encodings["h"])),
            kv=_bytes(torch.cat([block.to(blocks[0].device) for block in blocks], dim=1)),
            first_position=first_position,
        )


def quantize(real: torch.Tensor, encoding: Encoding) -> torch.Tensor:
    """`Encoding.quantize` of a uint8 grid, bit for bit, where the tensor is: [...] -> uint8 [...]."""
    levels = torch.round(real.double() / encoding.scale) + encoding.zero_point
    return levels.clamp_(0, UINT8_MAX).to(torch.uint8)


def _bytes(integers: torch.Tensor) -> bytes:
    return integers.contiguous().cpu().numpy().tobytes()
