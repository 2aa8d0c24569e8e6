"""The W4 head in float, step by step, from numpy to numpy; and behind the graph's integer contract for the device.

The network is `core.network.head` on the torch backend: weights, table and inputs of the integer graph, without its
16-bit activations. Knows no ring and no hand-off.

Legend: R roots, K steps, S steps with a runner-up.
"""

from collections.abc import Mapping

import numpy as np
import torch

from hyco_export.core.graphspec import GraphSpec
from hyco_export.core.network.boundary import to_real
from hyco_export.core.network.head import HeadNetwork, build
from hyco_export.core.network.weights import Weights
from hyco_export.nn.torch_ops import Observer, TorchOps, TorchWeights, ignore


class FloatHead:
    """K drafting steps for any number of roots, in float32.

    Args:
        network: its shape.
        weights: dequantised once.
    """

    def __init__(self, network: HeadNetwork, weights: Weights) -> None:
        self.network = network
        self.weights = weights
        self._real = TorchWeights(weights)

    @torch.no_grad()
    def draft(self, feeds: Mapping[str, np.ndarray], observe: Observer = ignore) -> dict[str, np.ndarray]:
        """Real inputs of R roots -> `chain` int32 [K, R] and `runner_up` int32 [S, R], kept rows.

        The window is what the feeds hold, so that the roots of one sequence can share it.
        """
        roots, window = feeds["mask.full"].shape
        network = self.network.with_window(window)
        ops = TorchOps(self._real, {name: torch.from_numpy(values) for name, values in feeds.items()}, observe)
        build(ops, network, roots)
        return {name: ids.numpy().reshape(-1, roots) for name, ids in ops.outputs.items()}


class TorchHeadSession:
    """A `GraphSession`: integers in by the graph's encodings, float32 inside, ids out.

    Args:
        head: network and weights.
        graph: inputs and outputs of the integer graph it stands for.
    """

    def __init__(self, head: FloatHead, graph: GraphSpec) -> None:
        self._head = head
        self._graph = graph

    def run(self, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """`chain` int32 [K] and `runner_up` int32 [S] for one root."""
        outputs = self._head.draft(to_real(self._graph.inputs, feeds))
        return {spec.name: outputs[spec.name].reshape(spec.shape) for spec in self._graph.outputs}

    def close(self) -> None:
        """Nothing to release: memory goes with the object."""
