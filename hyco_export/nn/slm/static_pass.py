"""The float SLM: static passes in torch, from numpy to numpy. Knows the network and its weights, no integers."""

from collections.abc import Mapping

import numpy as np
import torch

from hyco_export.core.encodings import Encoding
from hyco_export.core.network import slm
from hyco_export.core.network.slm import SlmNetwork
from hyco_export.nn.slm.rounded_pass import RoundedOps
from hyco_export.nn.torch_ops import Observer, TorchOps, TorchWeights, ignore


class FloatSlm:
    """The SLM as defined in `core.network.slm`, computed in float32.

    Args:
        network: its shape.
        weights: shared by all passes.
    """

    def __init__(self, network: SlmNetwork, weights: TorchWeights) -> None:
        self.network = network
        self._weights = weights

    @property
    def value_count(self) -> int:
        """Weights of all linear layers."""
        return self._weights.value_count

    def over(self, network: SlmNetwork) -> "FloatSlm":
        """The same weights under another network: other rings."""
        return FloatSlm(network, self._weights)

    @torch.no_grad()
    def tree(self, feeds: Mapping[str, np.ndarray], observe: Observer = ignore) -> dict[str, np.ndarray]:
        """Real inputs of a tree pass -> new K/V rows and logits."""
        ops = self._ops(feeds, observe)
        slm.build(ops, self.network, len(feeds["embeds"]))
        return _arrays(ops)

    @torch.no_grad()
    def rounded_tree(self, feeds: Mapping[str, np.ndarray], grids: Mapping[str, Encoding]) -> dict[str, np.ndarray]:
        """A tree pass in which the tensors named in `grids` are written on them."""
        ops = RoundedOps(self._weights, {name: torch.from_numpy(values) for name, values in feeds.items()}, grids)
        slm.build(ops, self.network, len(feeds["embeds"]))
        return _arrays(ops)

    @torch.no_grad()
    def prefill(self, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Real inputs of a prefill pass -> new K/V rows."""
        ops = self._ops(feeds, ignore)
        slm.build_prefill(ops, self.network, len(feeds["embeds"]))
        return _arrays(ops)

    def _ops(self, feeds: Mapping[str, np.ndarray], observe: Observer) -> TorchOps:
        return TorchOps(self._weights, {name: torch.from_numpy(values) for name, values in feeds.items()}, observe)


def _arrays(ops: TorchOps) -> dict[str, np.ndarray]:
    return {name: tensor.contiguous().numpy() for name, tensor in ops.outputs.items()}
