"""I/O specs of the NPU graphs: what the host must know to drive them, stored beside them as JSON.

`HeadSpec` and `SlmSpec` describe the artifacts, `GraphSpec` the inputs and outputs of one graph; `to_integers` and
`to_real` convert between real values and a graph's integers (graph I/O quantisation).

Names of graph inputs and outputs (shapes; R rows, W ring slots, H hidden, d head dim, N kv heads):

head    in   e, h                       uint8 [1, H]          hand-off, in its own encodings
             cos.<type>, sin.<type>     uint16 [1, d]         of the root's position, rotate-half's sign in sin
             k.<type>, v.<type>         uint8 [N, W, d]       the hand-off ring
             mask.<type>                uint16 [1, W]         0 = visible, `mask_value` = hidden
        out  chain                      int32 [K]             keep-set rows, top-1 of every step
             runner_up                  int32 [S]             keep-set rows, second of the first S steps
slm     in   embeds                     uint16 [R, H]         token embeddings, scaled by the host
             per_layer                  uint16 [R, L*P]       per-layer embeddings, scaled by the host
             cos.<type>, sin.<type>     uint16 [R, d]
             k.<i>, v.<i>               uint8 [N, W, d]       ring of the i-th layer that stores K/V; uint16 if wide
             mask.<type>                uint16 [R, W + R]     ring slots, then the rows of this pass
        out  logits                     uint16 [R, V]         over the keep set (tree pass only)
             k_new.<i>, v_new.<i>       as the ring [N, R, d] in the ring's encoding: the host only copies bytes
A prefill graph takes the inputs that its outputs need and no others (its spec lists them): feed by the spec.
<type> is `sliding` or `full`; <i> is the layer's index in the SLM.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Protocol, TypeVar

import msgspec
import numpy as np

from hyco_export.core.encodings import Encoding
from hyco_export.core.handoff import HandoffSpec, KvShape
from hyco_export.errors import ArtifactError

HEAD_SPEC_FILE = "head.json"
SLM_SPEC_FILE = "slm.json"
HEAD_GRAPH = "head"  # names of the graphs: <name>.onnx is the QDQ graph, <name>_ctx.onnx the compiled one
SLM_TREE_GRAPH = "slm_tree"
SLM_PREFILL_GRAPH = "slm_prefill"
Values = Mapping[str, np.ndarray]


class TensorSpec(msgspec.Struct, frozen=True):
    """One input or output. `encoding` is None for plain integers (token rows, ids)."""

    name: str
    shape: tuple[int, ...]
    dtype: str  # numpy name: uint8, uint16, int32
    encoding: Encoding | None = None

    def zeros(self) -> np.ndarray:
        """0.0 everywhere: the zero point."""
        return np.full(self.shape, self.encoding.zero_point if self.encoding else 0, self.dtype)


class GraphSpec(msgspec.Struct, frozen=True):
    """Inputs and outputs of one graph, in graph order."""

    name: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]

    def input(self, name: str) -> TensorSpec:
        return next(spec for spec in self.inputs if spec.name == name)

    def output(self, name: str) -> TensorSpec:
        return next(spec for spec in self.outputs if spec.name == name)


class GraphSession(Protocol):
    """Runs one graph: integers in, integers out, by name."""

    def run(self, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]: ...

    def close(self) -> None: ...


class HeadSpec(msgspec.Struct, frozen=True):
    """The head artifact without its weights."""

    steps: int  # K, chain length
    runner_up_steps: int  # S, first steps that also give their second-ranked token
    vocab_size: int
    keepset_digest: str
    verifier_digest: str  # of the verifier checkpoint the head belongs to
    handoff: HandoffSpec
    spans: dict[str, int | None]  # by layer type: span of ring.visible for a query at the ROOT's position
    inv_freq: dict[str, tuple[float, ...]]  # by layer type: rotary frequencies [d/2]
    mask_value: float
    graph: GraphSpec


class KvLayer(msgspec.Struct, frozen=True):
    """One SLM layer that stores K/V."""

    index: int
    layer_type: str
    shape: KvShape


class SlmSpec(msgspec.Struct, frozen=True, omit_defaults=True):
    """The SLM artifact without its weights."""

    rows: int  # rows of a tree pass
    prefill_rows: int
    vocab_size: int
    keepset_digest: str
    hidden: int
    per_layer_width: int  # L*P, 0 for models without per-layer embeddings
    rings: dict[str, int]  # ring capacity by layer type
    spans: dict[str, int | None]
    inv_freq: dict[str, tuple[float, ...]]
    layers: tuple[KvLayer, ...]
    mask_value: float
    tree: GraphSpec
    prefill: GraphSpec
    opening_token: int | None = (
        None  # attention sink (BOS): begins every text; its K/V rows are stored, it is never run
    )


Spec = TypeVar("Spec", HeadSpec, SlmSpec)


def read_spec(path: Path, kind: type[Spec]) -> Spec:
    """The spec stored at `path`.

    Raises:
        ArtifactError: missing, damaged or written by another version.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, msgspec.MsgspecError) as error:
        raise ArtifactError(f"{path} is not a {kind.__name__}: {error}", "build it again: hyco-export run") from error


def to_integers(tensors: Iterable[TensorSpec], real: Values) -> dict[str, np.ndarray]:
    """Integers of `tensors` (a graph's inputs or outputs), each in its encoding; other names in `real` are ignored."""
    return {
        spec.name: spec.encoding.quantize(real[spec.name]) if spec.encoding else real[spec.name].astype(spec.dtype)
        for spec in tensors
    }


def to_real(tensors: Iterable[TensorSpec], integers: Values) -> dict[str, np.ndarray]:
    """Real values float32 of `tensors`, each by its encoding; plain integers stay."""
    return {
        spec.name: spec.encoding.dequantize(integers[spec.name]) if spec.encoding else integers[spec.name]
        for spec in tensors
    }
