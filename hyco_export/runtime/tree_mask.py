"""Additive attention masks of one forward pass over a slot cache. Knows depths and visibility, no tokens.

Legend: L committed positions, R rows of the pass.
"""

import torch


def attention_mask(
    block: torch.Tensor, depths: torch.Tensor, length: int, first: int, window: int | None, dtype: torch.dtype
) -> torch.Tensor:
    """[1, 1, R, L - first + R]: 0 where a row sees a key, the type's minimum where not.

    block: bool [R, R], row i sees row j of the pass; depths [R]: row i stands at position L + depths[i];
    first: oldest committed position among the keys; window: sliding layers see the window - 1 positions before a row's
    own (transformers' Gemma 4: query - key < window).
    """
    hidden = torch.finfo(dtype).min
    seen = torch.ones(len(depths), length - first, dtype=torch.bool, device=block.device)
    if window is not None:
        positions = length + depths[:, None]
        seen = positions - torch.arange(first, length, device=block.device) < window
        block = block & (depths[:, None] - depths < window)
    visible = torch.cat([seen, block], dim=1)
    return torch.where(visible, 0.0, hidden).to(dtype)[None, None]
