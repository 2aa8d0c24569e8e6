"""The static SLM in float32: passes in torch, from numpy to numpy; some tensors rounded for measurements; and the
device's back end `torch`, the float network behind the integer inputs and outputs of the graphs.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from hyco_export.core.device_spec import SLM_SPEC_FILE, GraphSpec, SlmSpec, read_spec, to_integers, to_real
from hyco_export.core.encodings import Encoding
from hyco_export.core.network import slm
from hyco_export.core.network.host import AttentionSink, EmbeddingRows, SlmHost
from hyco_export.core.network.slm import SlmNetwork
from hyco_export.core.network.weight_files import WEIGHTS_FILE, read_slm
from hyco_export.models.torch_ops import Observer, TorchOps, TorchWeights, ignore

# ---- single tensors rounded, to measure what each costs


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
    def prefill(self, feeds: Mapping[str, np.ndarray], observe: Observer = ignore) -> dict[str, np.ndarray]:
        """Real inputs of a prefill pass -> new K/V rows."""
        ops = self._ops(feeds, observe)
        slm.build_prefill(ops, self.network, len(feeds["embeds"]))
        return _arrays(ops)

    def _ops(self, feeds: Mapping[str, np.ndarray], observe: Observer) -> TorchOps:
        return TorchOps(self._weights, {name: torch.from_numpy(values) for name, values in feeds.items()}, observe)


def _arrays(ops: TorchOps) -> dict[str, np.ndarray]:
    return {name: tensor.contiguous().numpy() for name, tensor in ops.outputs.items()}


# ---- the device's back end


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


# ---- the attention sink: K/V rows of the token that begins every text


def find_attention_sink(
    slm: FloatSlm, embeddings: EmbeddingRows, token: int, rows: int, mask_value: float
) -> AttentionSink:
    """Rows of `token` at position 0, by a pass of `rows` rows."""
    host = SlmHost(slm.network, embeddings, rows, mask_value)
    outputs = host.append(slm.tree, [token])
    names = [f"{kind}.{layer.index}" for layer in slm.network.storing for kind in ("k", "v")]
    return AttentionSink(token, {name: outputs[name.replace(".", "_new.")][:, :1] for name in names})
