"""Attention of a pass that packs the rows of several sessions, each of which sees keys of its own.

Everything else in a layer treats rows alike, so the rows of all sessions go through it together; here they part. A
registered attention of transformers: over plain tensors it is its `sdpa`, so a model that uses it stays an ordinary
one. K/V heads are not repeated for the query heads that share them: nothing of the context is copied.

Legend: H query heads, N K/V heads, G = H / N, R rows of one session, T keys it sees, d head dimension.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "hyco_slots"


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
    assert attention_mask is not None
    parts, start = [], 0
    for keys, values, (rows, mask) in zip(key, value, attention_mask, strict=True):
        parts.append(_attend_one(query[0, :, start : start + rows], keys, values, mask, scaling))
        start += rows
    return (parts[0] if len(parts) == 1 else torch.cat(parts))[None], None


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


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, sdpa_mask)
