"""The device back end `torch` of the SLM: the float network behind the integer inputs and outputs of its graphs.

Opens the artifact that also feeds the other back ends. Knows encodings and the float passes; no rings, no host logic.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from hyco_export.core.devicespec import SLM_SPEC_FILE, SlmSpec, read_spec
from hyco_export.core.graphspec import GraphSpec
from hyco_export.core.network.boundary import to_integers, to_real
from hyco_export.core.network.slm_file import WEIGHTS_FILE, read_slm
from hyco_export.nn.slm.static_pass import FloatSlm
from hyco_export.nn.torch_ops import TorchWeights


class TorchSlmSession:
    """A `GraphSession`: integers in, float32 inside, integers out.

    Args:
        graph: inputs and outputs with their encodings.
        run: the float pass of this graph.
    """

    def __init__(self, graph: GraphSpec, run: Callable[[Mapping[str, np.ndarray]], Mapping[str, np.ndarray]]) -> None:
        self._graph = graph
        self._run = run

    def run(self, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Outputs by name, in their encodings."""
        return to_integers(self._graph.outputs, self._run(to_real(self._graph.inputs, feeds)))

    def close(self) -> None:
        """Nothing to release: memory goes with the object."""


class SlmSessions(NamedTuple):
    """The two graphs of the SLM."""

    tree: TorchSlmSession
    prefill: TorchSlmSession


def open_torch_slm(folder: Path) -> SlmSessions:
    """Both float sessions of a `convert-slm` artifact, over one copy of the weights.

    Raises:
        ArtifactError: a file is missing or damaged.
    """
    spec = read_spec(folder / SLM_SPEC_FILE, SlmSpec)
    network, weights = read_slm(folder / WEIGHTS_FILE)
    slm = FloatSlm(network, TorchWeights(weights))
    return SlmSessions(TorchSlmSession(spec.tree, slm.tree), TorchSlmSession(spec.prefill, slm.prefill))
