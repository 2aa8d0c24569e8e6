"""Where along a graph two back ends part: SQNR tensor by tensor, in the graph's order, on the same saved inputs.

`graph_values` gives the values of each back end, or of a phone.
"""

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from hyco_export.bundle.spec import GRAPHS
from hyco_export.core.artifact import ENCODINGS_FILE, HEAD, HEAD_SAMPLES_FILE, SLM, SLM_SAMPLES_FILE
from hyco_export.core.device_spec import (
    HEAD_GRAPH,
    HEAD_SPEC_FILE,
    SLM_SPEC_FILE,
    SLM_TREE_GRAPH,
    GraphSpec,
    HeadSpec,
    SlmSpec,
    TensorSpec,
    read_spec,
)
from hyco_export.core.encodings import Encoding
from hyco_export.core.golden import read_samples
from hyco_export.core.network.blocks import only_feeds_tanh
from hyco_export.core.numerics import decibels
from hyco_export.errors import ArtifactError, HycoError

FLOAT, INTEGER, NPU = "torch", "onnx-cpu", "qnn"
BACKENDS = (FLOAT, INTEGER, NPU)
LOW_DB = 20.0  # a tensor below it has lost its accuracy: a healthy 16-bit one has 40 or more
DROP_DB = 6.0  # from what a tensor is made of to itself: the error doubles
HEALTHY_DB = 60.0  # drops are counted from here: exact inputs lose more than that in their first rounding
Arrays = Mapping[str, np.ndarray]


class Subject(NamedTuple):
    """A graph of a run with all tensors that can be compared, in the graph's order."""

    run: Path
    name: str
    model: Path
    spec: GraphSpec
    tensors: tuple[TensorSpec, ...]
    feeds: list[dict[str, np.ndarray]]

    @property
    def inner(self) -> tuple[TensorSpec, ...]:
        """The tensors that are no outputs."""
        outputs = {tensor.name for tensor in self.spec.outputs}
        return tuple(tensor for tensor in self.tensors if tensor.name not in outputs)


class TensorDivergence(msgspec.Struct, frozen=True):
    """One tensor over all feeds. `drop_db`: how much lower its SQNR is than that of the worst tensor it is made of.
    `equal_share`: of its integers, or ids; ids have no dB. `saturates`: clipped on purpose, since tanh flattens it.
    """

    name: str
    sqnr_db: float | None
    drop_db: float | None
    equal_share: float
    made_of: tuple[str, ...]
    saturates: bool = False


class Divergence(msgspec.Struct, frozen=True):
    """Two back ends on one graph. `first`: the first tensor that is low while all that it is made of is not, or the
    first ids that differ; `steepest`: the one with the largest drop."""

    graph: str
    reference: str
    candidate: str
    feeds: int
    tensors: tuple[TensorDivergence, ...]
    first: str | None
    steepest: str | None
    not_compared: tuple[str, ...]  # tensors that a side does not have


def require_source(source: str) -> None:
    """Asked before anything is run. Raises HycoError: `source` is neither a back end nor a folder."""
    if source not in BACKENDS and not Path(source).exists():
        known = f"give {', '.join(BACKENDS)}, or a folder with outputs from a phone"
        raise HycoError(f"{source!r} is neither a back end nor a folder", known)


def require_graph(graph: str) -> None:
    """Raises HycoError: there is no such graph."""
    if graph not in GRAPHS:
        raise HycoError(f"unknown graph {graph!r}", f"graphs: {', '.join(GRAPHS)}")


def open_subject(run: Path, graph: str, feeds: int, pattern: str = "*") -> Subject:
    """A graph of a run folder with its first `feeds` sample inputs; inner tensors whose names match `pattern`.

    Raises:
        HycoError: no such graph.
        ArtifactError: an artifact is missing or damaged.
    """
    require_graph(graph)
    folder = run / (HEAD if graph == HEAD_GRAPH else SLM)
    if graph == HEAD_GRAPH:
        spec, samples = read_spec(folder / HEAD_SPEC_FILE, HeadSpec).graph, folder / HEAD_SAMPLES_FILE
    else:
        slm, samples = read_spec(folder / SLM_SPEC_FILE, SlmSpec), folder / SLM_SAMPLES_FILE
        spec = slm.tree if graph == SLM_TREE_GRAPH else slm.prefill
    found = read_samples(samples).get(graph, [])
    if not found:
        raise ArtifactError(f"{samples} holds no feeds of {graph}", f"build it again: hyco-export {folder.name}")
    model = folder / f"{graph}.onnx"
    return Subject(run, graph, model, spec, _tensors(model, folder, spec, pattern), found[:feeds])


def _tensors(model: Path, folder: Path, spec: GraphSpec, pattern: str) -> tuple[TensorSpec, ...]:
    """Outputs and calibrated inner tensors of the graph, in the order of its nodes."""
    import onnx

    from hyco_export.graph.index import GraphIndex

    encodings = msgspec.json.decode((folder / ENCODINGS_FILE).read_bytes(), type=dict[str, Encoding])
    index = GraphIndex(onnx.load(model, load_external_data=False), folder)
    outputs, inputs = {tensor.name: tensor for tensor in spec.outputs}, {tensor.name for tensor in spec.inputs}
    found = []
    for name in (name for node in index.nodes for name in node.output):
        if name in outputs:
            found.append(outputs[name])
            continue
        wanted = name in encodings and name not in inputs and fnmatchcase(name, pattern)
        shape = index.shape(name) if wanted else None
        if shape is not None and None not in shape:
            fixed = tuple(dim for dim in shape if dim is not None)
            found.append(TensorSpec(name, fixed, encodings[name].dtype, encodings[name]))
    return tuple(found)


def compare_values(
    subject: Subject, names: tuple[str, str], wanted: Sequence[Arrays], found: Sequence[Arrays]
) -> Divergence:
    """Tensor by tensor; `names` of reference and candidate."""
    common = [tensor for tensor in subject.tensors if tensor.name in wanted[0] and tensor.name in found[0]]
    parents = _parents(subject, {tensor.name for tensor in common})
    measured: dict[str, TensorDivergence] = {}
    for tensor in common:
        pairs = [(left[tensor.name], right[tensor.name]) for left, right in zip(wanted, found, strict=True)]
        above = [measured[name].sqnr_db for name in parents[tensor.name] if name in measured]
        measured[tensor.name] = _compared(tensor, pairs, parents[tensor.name], above)
    tensors = tuple(measured.values())
    missing = tuple(tensor.name for tensor in subject.tensors if tensor.name not in measured)
    return Divergence(
        subject.name, *names, len(wanted), tensors, _first(tensors, measured), _steepest(tensors), missing
    )


def _compared(
    tensor: TensorSpec,
    pairs: Sequence[tuple[np.ndarray, np.ndarray]],
    made_of: tuple[str, ...],
    above: Sequence[float | None],
) -> TensorDivergence:
    encoding = tensor.encoding
    if encoding is None:
        equal = float(np.mean([np.mean(left == right) for left, right in pairs]))
        return TensorDivergence(tensor.name, None, None, equal, made_of)
    equal = float(np.mean([np.mean(encoding.quantize(left) == encoding.quantize(right)) for left, right in pairs]))
    signal = sum(float(np.sum(np.asarray(left, np.float64) ** 2)) for left, _ in pairs)
    noise = sum(float(np.sum((np.asarray(left, np.float64) - right) ** 2)) for left, right in pairs)
    own = decibels(signal, noise)
    known = [value for value in above if value is not None]
    drop = min(HEALTHY_DB, *known) - own if known else None
    return TensorDivergence(tensor.name, own, drop, equal, made_of, only_feeds_tanh(tensor.name))


def _parents(subject: Subject, known: set[str]) -> dict[str, tuple[str, ...]]:
    """For each tensor the nearest compared ones that it is made of."""
    import onnx

    from hyco_export.graph.index import GraphIndex

    index = GraphIndex(onnx.load(subject.model, load_external_data=False))
    inputs = {tensor.name for tensor in subject.spec.inputs}
    found: dict[str, tuple[str, ...]] = {}
    for name in known:
        seen, stack, nearest = {name}, [name], []
        while stack:
            node = index.producer.get(stack.pop())
            for source in node.input if node is not None else ():
                if source in seen or source in index.constants or source in inputs:
                    continue
                seen.add(source)
                if source in known:
                    nearest.append(source)
                else:
                    stack.append(source)
        found[name] = tuple(sorted(nearest))
    return found


def _first(tensors: Sequence[TensorDivergence], measured: Mapping[str, TensorDivergence]) -> str | None:
    for tensor in tensors:
        low = tensor.equal_share < 1.0 if tensor.sqnr_db is None else tensor.sqnr_db < LOW_DB
        made_of = (measured[name] for name in tensor.made_of if name in measured)
        above = [one.sqnr_db for one in made_of if not one.saturates]
        if low and not tensor.saturates and all(value is None or value >= LOW_DB for value in above):
            return tensor.name
    return None


def _steepest(tensors: Sequence[TensorDivergence]) -> str | None:
    drops = [(one.drop_db, one.name) for one in tensors if one.drop_db is not None and not one.saturates]
    drop, name = max(drops, default=(0.0, ""))
    return name if drop >= DROP_DB else None
