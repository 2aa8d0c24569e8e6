"""Attention of a pass that packs the rows of several sessions, each of which sees keys of its own, and its masks.

Everything else in a layer treats rows alike, so the rows of all sessions go through it together; here they part. A
registered attention of transformers: over plain tensors it is its `sdpa`, so a model that uses it stays an ordinary
one. K/V heads are not repeated for the query heads that share them: nothing of the context is copied. Of few rows such
query heads stand below each other, as R * G rows of one head, so that its K/V are read once.

Legend: H query heads, N K/V heads, G = H / N, R rows of one session, T keys it sees, d head dimension.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from hyco_export.core.ring import ancestor_mask
from hyco_export.protocol.tree import depths

NAME = "hyco_slots"
FEW_ROWS = 64  # a root and its tree; a prompt's pieces have more, and masks that cost more G times than they save
KeysValues = tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]  # by session


class Seen(NamedTuple):
    """Rows of one session in the pass and their additive mask [1, 1, R, T]; None where every row sees every key."""

    rows: int
    mask: torch.Tensor | None


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor | Sequence[torch.Tensor],
    value: torch.Tensor | Sequence[torch.Tensor],
    attention_mask: torch.Tensor | Sequence[Seen] | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """query [1, H, sum of R, d], key and value [N, T, d] by session -> [1, sum of R, H, d]."""
    if isinstance(key, torch.Tensor):
        plain = cast(torch.Tensor, value), cast(torch.Tensor | None, attention_mask)
        return sdpa_attention_forward(module, query, key, *plain, scaling=scaling, **kwargs)
    assert attention_mask is not None and not isinstance(value, torch.Tensor)
    rows = query[0].transpose(0, 1)
    seen = _by_query(cast(Sequence[Seen], attention_mask), query.shape[1] // key[0].shape[0])
    return _attend_all(rows, key, value, seen, scaling).view(1, *rows.shape), None


def _by_query(seen: Sequence[Seen], group: int) -> list[Seen]:
    """The masks [1, 1, R * G, T] of few rows, each row's as often as there are queries that share a K/V head."""
    return [
        part
        if part.mask is None or part.rows > FEW_ROWS
        else Seen(part.rows, part.mask.transpose(1, 2).expand(-1, -1, group, -1).reshape(1, 1, part.rows * group, -1))
        for part in seen
    ]


def _attend_all(
    query: torch.Tensor,
    key: Sequence[torch.Tensor],
    value: Sequence[torch.Tensor],
    seen: Sequence[Seen],
    scaling: float | None,
) -> torch.Tensor:
    """query [sum of R, H, d] -> [sum of R, H * d]."""
    if len(seen) == 1:
        return _attend_one(query, key[0], value[0], seen[0].mask, scaling)
    parts, start = [], 0
    for keys, values, (rows, mask) in zip(key, value, seen, strict=True):
        parts.append(_attend_one(query[start : start + rows], keys, values, mask, scaling))
        start += rows
    return torch.cat(parts)


def _attend_one(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None, scaling: float | None
) -> torch.Tensor:
    """query [R, H, d], keys and values [N, T, d], a mask of `_by_query` -> [R, H * d]."""
    rows, _, head_dim = query.shape
    kv_heads = keys.shape[0]
    if mask is not None and rows > FEW_ROWS:
        return _attend_many(query, keys, values, mask, scaling)
    grouped = query.reshape(rows, kv_heads, -1, head_dim).transpose(0, 1).reshape(1, kv_heads, -1, head_dim)
    output = functional.scaled_dot_product_attention(grouped, keys[None], values[None], attn_mask=mask, scale=scaling)
    return output.view(kv_heads, rows, -1).transpose(0, 1).reshape(rows, -1)


def _attend_many(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, scaling: float | None
) -> torch.Tensor:
    """The same for many rows, whose masks [1, 1, R, T] are too large to be repeated."""
    rows, _, head_dim = query.shape
    kv_heads = keys.shape[0]
    grouped = query.reshape(rows, kv_heads, -1, head_dim).permute(1, 2, 0, 3)  # [N, G, R, d]
    shape = (-1, grouped.shape[1], -1, -1)  # the group's queries read one K/V head: a view, not a copy
    output = functional.scaled_dot_product_attention(
        grouped, keys[:, None].expand(shape), values[:, None].expand(shape), attn_mask=mask, scale=scaling
    )
    return output.permute(2, 0, 1, 3).reshape(rows, -1)


class PackedAttention:
    """models.fused_layers.Attention for packed rows.

    Args:
        seen: rows and masks by layer type, one for each session.
        update: writes K/V [1, N, sum of R, d] of a layer and returns what each session sees, [N, T, d] each; None where
            all K/V are given.
        given: K/V of the layer types by session, for layers that reuse them.
    """

    def __init__(
        self,
        seen: Mapping[str, Sequence[Seen]],
        update: Callable[[torch.Tensor, torch.Tensor, int], KeysValues] | None = None,
        given: Mapping[str, KeysValues] | None = None,
    ) -> None:
        self._seen = seen
        self._by_query: dict[str, list[Seen]] = {}
        self._update = update
        self._shared: dict[str, KeysValues] = dict(given or {})
        self._newest: dict[str, KeysValues] = {}

    def store(self, layer: int, layer_type: str, keys: torch.Tensor, values: torch.Tensor, shared: bool) -> None:
        assert self._update is not None
        self._newest[layer_type] = self._update(keys.transpose(0, 1)[None], values.transpose(0, 1)[None], layer)
        if shared:
            self._shared[layer_type] = self._newest[layer_type]

    def attend(self, layer_type: str, query: torch.Tensor, scale: float) -> torch.Tensor:
        own = layer_type in self._newest
        keys, values = self._newest.pop(layer_type) if own else self._shared[layer_type]
        seen = self._by_query.get(layer_type)  # the layers of a type have the same heads
        if seen is None:
            seen = self._by_query[layer_type] = _by_query(self._seen[layer_type], query.shape[1] // keys[0].shape[0])
        return _attend_all(query, keys, values, seen, scale)


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, sdpa_mask)


# --- which rows and keys a row sees in one pass over a slot cache, as additive masks

Rows = tuple[np.ndarray, np.ndarray]  # depths [R], row i stands at position L + depth; bool [R, R]: i sees row j


def prompt_rows(count: int) -> Rows:
    """A piece of a prompt: each row one deeper than the one before, which it sees."""
    rows = np.arange(count)
    return rows, rows[:, None] >= rows


def tree_rows(parents: np.ndarray) -> Rows:
    """The root, which all rows see, and the nodes of a tree below it, parents [N]."""
    nodes = parents.tolist()
    block = np.zeros((1 + len(nodes), 1 + len(nodes)), bool)
    block[:, 0] = True
    block[1:, 1:] = ancestor_mask(nodes)
    return np.concatenate([[0], depths(nodes)]), block


def attention_mask(
    block: np.ndarray,
    row_depths: np.ndarray,
    length: int,
    first: int,
    window: int | None,
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor:
    """[1, 1, R, L - first + R]: 0 where a row sees a key, the type's minimum where not.

    block: bool [R, R], row i sees row j of the pass; row_depths [R]: row i stands at position L + row_depths[i];
    first: oldest committed position among the keys; window: sliding layers see the window - 1 positions before a row's
    own (transformers' Gemma 4: query - key < window).
    """

    def bias(visible: np.ndarray) -> torch.Tensor:
        values = np.where(visible, 0.0, torch.finfo(dtype).min).astype(np.float32)
        return torch.from_numpy(values).to(device, dtype)

    past = length - first
    mask = torch.zeros(1, 1, len(row_depths), past + len(row_depths), dtype=dtype, device=device)
    if window is not None:
        block = block & (row_depths[:, None] - row_depths < window)
        lost = length + row_depths - window + 1 - first  # [R] oldest keys that are out of a row's reach
        width = int(min(past, lost.max()))
        if width > 0:
            mask[..., :width] = bias(np.arange(width) >= lost[:, None])
    mask[..., past:] = bias(block)
    return mask
