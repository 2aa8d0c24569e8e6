"""Who sees whom in one forward pass over a slot cache, as additive masks. Knows depths and visibility, no tokens.

Legend: L committed positions, R rows of the pass.
"""

import numpy as np
import torch

from hyco_export.runtime.tree import ancestor_mask, depths

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
