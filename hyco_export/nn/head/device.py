"""The head as the device runs it, in float, put together from the artifacts of a run.

Reads `qat-head` (weights), `build-keepset` (output rows, embedding table) and `capture` (the verifier's final norm).
Knows those files; no graph.
"""

from collections.abc import Mapping
from pathlib import Path

import msgspec

from hyco_export.core.devicespec import HEAD_SPEC_FILE, HeadSpec, read_spec
from hyco_export.core.handoff import HiddenNorm
from hyco_export.core.keepset import read_keepset
from hyco_export.core.layout import CAPTURE, FINAL_NORM_FILE, HEAD, KEEPSET, QAT_HEAD
from hyco_export.core.network.head import STATE_HALF, HeadNetwork
from hyco_export.core.network.head_file import read_head
from hyco_export.core.network.kept_table import read_kept_table
from hyco_export.core.network.projected_table import project_table
from hyco_export.errors import ArtifactError
from hyco_export.nn.final_norm import load_norm
from hyco_export.nn.head.static_pass import FloatHead, TorchHeadSession


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
    """The same head with the table of products, and the signal to noise ratio in dB of that table's rows."""
    projected = project_table(head.weights)
    network = msgspec.structs.replace(head.network, projected_table=True)
    return FloatHead(network, projected.weights), projected.sqnr_db


def open_float_head(run: Path, hidden_norm: HiddenNorm | None = None) -> FloatHead:
    """The float head of a run folder; h from the side that its `convert-head` artifact says, or from `hidden_norm`.

    Raises:
        ArtifactError: an artifact is missing or damaged.
    """
    spec = read_spec(run / HEAD / HEAD_SPEC_FILE, HeadSpec)
    folders = {stage: run / stage for stage in (CAPTURE, QAT_HEAD, KEEPSET)}
    side = hidden_norm or spec.handoff.hidden_norm
    return float_head(folders, spec.steps, spec.runner_up_steps, spec.handoff.window, side)


def open_torch_head(run: Path) -> TorchHeadSession:
    """The float head of a run folder behind the integer contract of its `convert-head` artifact.

    It looks up embeddings, whichever table the graph has: it is what the graph is compared with.

    Raises:
        ArtifactError: an artifact is missing or damaged.
    """
    spec = read_spec(run / HEAD / HEAD_SPEC_FILE, HeadSpec)
    return TorchHeadSession(open_float_head(run), spec.graph)
