"""p~ over the whole vocabulary: what the laws of sampling are said of; the server keeps only the tokens with mass."""

import numpy as np

from hyco_export.protocol.sampling import Support, sampling_support
from hyco_export.protocol.wire import Sampling


def dense(support: Support, vocab_size: int) -> np.ndarray:
    """p~ [R, V] float32."""
    rows = np.zeros((len(support.ids), vocab_size), np.float32)
    np.add.at(rows, (np.arange(len(rows))[:, None], support.ids), support.probs)
    return rows


def sampling_distribution(logits: np.ndarray, sampling: Sampling) -> np.ndarray:
    """logits [R, V] float32 (after the soft-cap) -> p~ [R, V] float32; raises as `sampling_support`."""
    return dense(sampling_support(logits, sampling), logits.shape[1])
