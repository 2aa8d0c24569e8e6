"""Additive attention masks of one forward pass over a slot cache. Knows depths and visibility, no tokens.

Legend: L committed positions, R rows of the pass.
"""

import numpy as np
import torch


def attention_mask(
    block: np.ndarray,
    depths: np.ndarray,
    length: int,
    first: int,
    window: int | None,
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor:
    """[1, 1, R, L - first + R]: 0 where a row sees a key, the type's minimum where not.

    block: bool [R, R], row i sees row j of the pass; depths [R]: row i stands at position L + depths[i];
    first: oldest committed position among the keys; window: sliding layers see the window - 1 positions before a row's
    own (transformers' Gemma 4: query - key < window).
    """

    def bias(visible: np.ndarray) -> torch.Tensor:
        values = np.where(visible, 0.0, torch.finfo(dtype).min).astype(np.float32)
        return torch.from_numpy(values).to(device, dtype)

    past = length - first
    mask = torch.zeros(1, 1, len(depths), past + len(depths), dtype=dtype, device=device)
    if window is not None:
        block = block & (depths[:, None] - depths < window)
        lost = length + depths - window + 1 - first  # [R] oldest keys that are out of a row's reach
        width = int(min(past, lost.max()))
        if width > 0:
            mask[..., :width] = bias(np.arange(width) >= lost[:, None])
    mask[..., past:] = bias(block)
    return mask
