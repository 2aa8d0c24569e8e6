"""The float SLM with some of its tensors written on their integer grids: what the rounding of these alone changes.

Knows grids by tensor name; tensors without a range of their own (softmax, tanh, masks) stay in float.
"""

from collections.abc import Mapping

import numpy as np
import torch

from hyco_export.core.encodings import Encoding
from hyco_export.nn.torch_ops import TorchOps, TorchWeights


class RoundedOps(TorchOps):
    """One pass in float32 in which every tensor named in `grids` is rounded as soon as it is made."""

    def __init__(self, weights: TorchWeights, feeds: Mapping[str, torch.Tensor], grids: Mapping[str, Encoding]) -> None:
        super().__init__(weights, feeds)
        self._grids = grids

    def _seen(self, name: str, values: torch.Tensor) -> torch.Tensor:
        grid = self._grids.get(name)
        return super()._seen(name, values if grid is None else on_grid(values, grid))


def on_grid(values: torch.Tensor, grid: Encoding) -> torch.Tensor:
    """The real values that the integers of a grid stand for."""
    info = np.iinfo(grid.dtype)
    return torch.fake_quantize_per_tensor_affine(values, grid.scale, grid.zero_point, int(info.min), int(info.max))
