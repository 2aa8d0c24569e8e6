"""The static SLM before rounding: weights and embeddings of an unquantised checkpoint as they are.

What the rounded network is judged by, and what is compared with transformers' model. Knows the float checkpoint and the
network's names; no integers.
"""

import numpy as np

from hyco_export.core.network.slm import SlmNetwork
from hyco_export.core.network.weights import Weights
from hyco_export.nn.slm.float_checkpoint import FloatCheckpoint
from hyco_export.nn.slm.static_pass import FloatSlm
from hyco_export.nn.slm.surgery import (
    MODEL_PREFIX,
    OUTPUT_LAYER,
    PER_LAYER_SHARE,
    PER_LAYER_TABLE,
    TOKEN_TABLE,
    network_vectors,
)
from hyco_export.nn.torch_ops import TorchWeights


def original_slm(checkpoint: FloatCheckpoint, network: SlmNetwork, kept: np.ndarray) -> FloatSlm:
    """The float network; its output layer has the rows of the token ids `kept` [V] only."""
    matrices = {
        name.removeprefix(MODEL_PREFIX): checkpoint.float_matrix(name, kept if name == OUTPUT_LAYER else None)
        for name in checkpoint.linears
    }
    return FloatSlm(network, TorchWeights(Weights(matrices, network_vectors(checkpoint), {})))


class OriginalEmbeddings:
    """Embedding rows, read from the checkpoint's files as they are asked for (`EmbeddingRows`)."""

    def __init__(self, checkpoint: FloatCheckpoint) -> None:
        self._checkpoint = checkpoint

    def tokens(self, ids: np.ndarray) -> np.ndarray:
        """float32 [n, H] of ids [n]."""
        return self._checkpoint.rows(TOKEN_TABLE, ids)

    def per_layer(self, ids: np.ndarray) -> np.ndarray:
        """float32 [n, L * P] of ids [n], their share of the sum inside."""
        return self._checkpoint.rows(PER_LAYER_TABLE, ids) * np.float32(PER_LAYER_SHARE)
