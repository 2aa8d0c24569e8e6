"""Attention of a pass that packs the rows of several sessions, each of which sees keys of its own.

Everything else in a layer treats rows alike, so the rows of all sessions go through it together; here they part. A
registered attention of transformers: over plain tensors it is its `sdpa`, so a model that uses it stays an ordinary
one. K/V heads are not repeated for the query heads that share them: nothing of the context is copied.

Legend: H query heads, N K/V heads, G = H / N, R rows of one session, T keys it sees, d head dimension.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "hyco_slots"
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
    return _attend_all(query[0], key, value, cast(Sequence[Seen], attention_mask), scaling)[None], None


def _attend_all(
    query: torch.Tensor,
    key: Sequence[torch.Tensor],
    value: Sequence[torch.Tensor],
    seen: Sequence[Seen],
    scaling: float | None,
) -> torch.Tensor:
    """query [H, sum of R, d] -> [sum of R, H, d]."""
    if len(seen) == 1:
        return _attend_one(query, key[0], value[0], seen[0].mask, scaling)
    parts, start = [], 0
    for keys, values, (rows, mask) in zip(key, value, seen, strict=True):
        parts.append(_attend_one(query[:, start : start + rows], keys, values, mask, scaling))
        start += rows
    return torch.cat(parts)


def _attend_one(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None, scaling: float | None
) -> torch.Tensor:
    """query [H, R, d], keys and values [N, T, d] -> [R, H, d]."""
    kv_heads = keys.shape[0]
    grouped = query.unflatten(0, (kv_heads, -1))  # [N, G, R, d]
    shape = (-1, grouped.shape[1], -1, -1)  # the group's queries read one K/V head: a view, not a copy
    output = functional.scaled_dot_product_attention(
        grouped, keys[:, None].expand(shape), values[:, None].expand(shape), attn_mask=mask, scale=scaling
    )
    return output.flatten(0, 1).transpose(0, 1)


class PackedAttention:
    """nn.fused_stack.Attention for packed rows.

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
        return _attend_all(query.transpose(0, 1), keys, values, self._seen[layer_type], scale)


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, sdpa_mask)
