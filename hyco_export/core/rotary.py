"""Rotary tables made on the host: the graph only multiplies and adds (HyCo, Appendix A). Pure numpy; knows no model."""

from collections.abc import Sequence

import numpy as np


def rotary_tables(positions: np.ndarray, inv_freq: Sequence[float]) -> tuple[np.ndarray, np.ndarray]:
    """cos and sin, float32 [R, d], of positions [R] for frequencies [d/2] (0 where a pair does not rotate).

    Follows transformers' `Gemma4TextRotaryEmbedding` in float32, except for the sign of rotate-half, (-x2, x1): it is
    folded into the first half of sin, so that the graph swaps the halves and never negates.
    """
    angles = positions.astype(np.float32)[:, None] * np.asarray(inv_freq, np.float32)[None, :]  # [R, d/2]
    cos, sin = np.cos(angles), np.sin(angles)
    return np.concatenate([cos, cos], axis=1), np.concatenate([-sin, sin], axis=1)
