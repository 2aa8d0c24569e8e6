"""The static head network in float: with numpy inputs and outputs, and with the integer ones of the graph.

The network is `core.network.head` on the torch back end (`torch_ops`): it has weights, table and inputs of the integer
graph, without its 16-bit activations.

Legend: R roots, K steps, S steps with a runner-up.
"""

from collections.abc import Mapping
from pathlib import Path

import msgspec
import numpy as np
import torch

from hyco_export.core.artifact import CAPTURE, FINAL_NORM_FILE, HEAD, KEEPSET, QAT_HEAD
from hyco_export.core.device_spec import HEAD_SPEC_FILE, GraphSpec, HeadSpec, read_spec, to_real
from hyco_export.core.handoff import HiddenNorm
from hyco_export.core.keepset import read_keepset
from hyco_export.core.network.head import STATE_HALF, HeadNetwork, build
from hyco_export.core.network.weight_files import read_head
from hyco_export.core.network.weights import Weights, project_table, read_kept_table
from hyco_export.errors import ArtifactError
from hyco_export.models.head.unroll import load_norm
from hyco_export.models.torch_ops import Observer, TorchOps, TorchWeights, ignore


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
        """Real inputs of R roots -> `chain` int32 [K, R] and `runner_up` int32 [S, R], as rows of the keep set.

        The window is as long as the feeds have it: the roots of one sequence can share it.
        """
        roots, window = feeds["mask.full"].shape
        network = self.network.with_window(window)
        ops = TorchOps(self._real, {name: torch.from_numpy(values) for name, values in feeds.items()}, observe)
        build(ops, network, roots)
        return {name: ids.numpy().reshape(-1, roots) for name, ids in ops.outputs.items()}


class TorchHeadSession:
    """A `GraphSession` of the integer graph's inputs and outputs that computes in float32.

    Args:
        head: network and weights.
        graph: inputs and outputs of the integer graph.
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


# ---- the device's back end


def float_head(
    folders: Mapping[str, Path], steps: int, runner_up_steps: int, window: int, hidden_norm: HiddenNorm
) -> FloatHead:
    """K steps of the trained head over the keep set; `folders` by stage name.

    Raises:
        ArtifactError: an artifact is missing, damaged, or keeps tokens that the head does not have.
    """
    stored = read_head(folders[QAT_HEAD])
    keepset = read_keepset(folders[KEEPSET])
    if keepset.vocab_size != stored.architecture.vocab_size:
        raise ArtifactError(
            f"the keep set is of a vocabulary of {keepset.vocab_size}, the head's has {stored.architecture.vocab_size}",
            "build both again from one recipe: hyco-export run",
        )
    norm = load_norm(folders[CAPTURE] / FINAL_NORM_FILE)
    network = HeadNetwork(
        architecture=stored.architecture,
        steps=steps,
        runner_up_steps=runner_up_steps,
        window=window,
        hidden_norm=hidden_norm,
        final_epsilon=norm.epsilon,
        split_projection=STATE_HALF in stored.matrices,
    )
    final_norm = norm.weight.numpy() if hidden_norm == "pre" else None
    return FloatHead(network, stored.device_weights(keepset.ids, read_kept_table(folders[KEEPSET]), final_norm))


def with_projected_table(head: FloatHead) -> tuple[FloatHead, float]:
    """The same head with a table of projected embeddings, and the SQNR in dB of that table."""
    projected = project_table(head.weights)
    network = msgspec.structs.replace(head.network, projected_table=True)
    return FloatHead(network, projected.weights), projected.sqnr_db


def open_float_head(run: Path, hidden_norm: HiddenNorm | None = None) -> FloatHead:
    """The float head of a run folder; it reads h from the side `hidden_norm`, else as its `convert-head` artifact says.

    Raises:
        ArtifactError: an artifact is missing or damaged.
    """
    spec = read_spec(run / HEAD / HEAD_SPEC_FILE, HeadSpec)
    folders = {stage: run / stage for stage in (CAPTURE, QAT_HEAD, KEEPSET)}
    side = hidden_norm or spec.handoff.hidden_norm
    return float_head(folders, spec.steps, spec.runner_up_steps, spec.handoff.window, side)


def open_torch_head(run: Path) -> TorchHeadSession:
    """The float head of a run folder with the integer inputs and outputs of its `convert-head` artifact.

    The graph is compared with it: it looks up embeddings even where the graph has a table of projected ones.

    Raises:
        ArtifactError: an artifact is missing or damaged.
    """
    spec = read_spec(run / HEAD / HEAD_SPEC_FILE, HeadSpec)
    return TorchHeadSession(open_float_head(run), spec.graph)
