"""The head's first matrix as the two it is: one for the embedding, one for the state, each a linear layer of its own.

`pre_projection` [M, 2 H] reads both side by side. Where their sizes differ, so do the weights of its halves, and one
scale per output channel leaves the small half a few of its 16 integers. Seen on the embedded family: state values 3.7
times as large as embeddings, their weights 4.7 times as small, and over half of what 4 bits lose in this one matrix.
Knows the module and matrices; no grids.

Legend: H the verifier's hidden size, M the head's.
"""

from collections.abc import Mapping

import torch
from torch import nn
from transformers import Gemma4AssistantForCausalLM

from hyco_export.core.network.head import EMBEDDING_HALF, PRE_PROJECTION, STATE_HALF
from hyco_export.core.network.weights import IntegerMatrix


class SplitProjection(nn.Module):
    """embedding(e) + state(h) of [e, h] [..., 2 H]: [..., M]; the layers are called as in the static network."""

    def __init__(self, whole: nn.Linear) -> None:
        super().__init__()
        width = whole.in_features // 2
        self.embedding = _linear(whole.weight[:, :width])
        self.state = _linear(whole.weight[:, width:])

    def forward(self, joined: torch.Tensor) -> torch.Tensor:
        embedding, state = joined.chunk(2, dim=-1)
        return self.embedding(embedding) + self.state(state)


def split_projection(head: Gemma4AssistantForCausalLM) -> None:
    """Put two layers in place of the first; the same function to the rounding of one sum."""
    head.pre_projection = SplitProjection(head.pre_projection)  # type: ignore[assignment]  # declared as nn.Linear


def split_matrices(matrices: Mapping[str, IntegerMatrix]) -> dict[str, IntegerMatrix]:
    """Integers of a head with the whole matrix for one with the two: halves of the columns, the same scales."""
    others = dict(matrices)
    whole = others.pop(PRE_PROJECTION)
    width = whole.integers.shape[1] // 2
    return {**others, EMBEDDING_HALF: whole.columns(0, width), STATE_HALF: whole.columns(width, 2 * width)}


def _linear(weight: torch.Tensor) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    layer.weight = nn.Parameter(weight.detach().clone(), requires_grad=False)
    return layer
