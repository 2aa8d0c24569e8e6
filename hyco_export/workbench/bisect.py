"""Where along a graph two back ends part: SQNR tensor by tensor, in the graph's order, on the same saved inputs.

Back ends: the float network (`torch`), the integer graph on the CPU (`onnx-cpu`), the compiled graph in the emulator or
on this machine's NPU (`qnn`, compiled anew with its inner tensors as outputs), or a folder with what came from a phone.
A phone gives a graph's own outputs (an SLM: the K/V rows of every layer) or, from the pair of `--probe`, all tensors.
"""

import tempfile
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import onnx
import torch

from hyco_export.core.artifact import ENCODINGS_FILE, HEAD, HEAD_SAMPLES_FILE, SLM, SLM_SAMPLES_FILE
from hyco_export.core.device_spec import (
    HEAD_GRAPH,
    HEAD_SPEC_FILE,
    SLM_PREFILL_GRAPH,
    SLM_SPEC_FILE,
    SLM_TREE_GRAPH,
    GraphSession,
    GraphSpec,
    HeadSpec,
    SlmSpec,
    TensorSpec,
    read_spec,
    to_real,
)
from hyco_export.core.encodings import Encoding
from hyco_export.core.golden import read_samples
from hyco_export.core.network.blocks import only_feeds_tanh
from hyco_export.core.network.weight_files import WEIGHTS_FILE, read_slm
from hyco_export.core.numerics import decibels
from hyco_export.core.targets import Target
from hyco_export.errors import ArtifactError, HycoError
from hyco_export.graph.index import GraphIndex
from hyco_export.graph.parity import ReferenceSession
from hyco_export.graph.slm_graphs import with_outputs

FLOAT, INTEGER, NPU = "torch", "onnx-cpu", "qnn"
GRAPHS = (HEAD_GRAPH, SLM_TREE_GRAPH, SLM_PREFILL_GRAPH)
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


class TensorParting(msgspec.Struct, frozen=True):
    """One tensor over all feeds. `drop_db`: how much lower its SQNR is than that of the worst tensor it is made of.
    `equal_share`: of its integers, or ids; ids have no dB. `saturates`: clipped on purpose, since tanh flattens it.
    """

    name: str
    sqnr_db: float | None
    drop_db: float | None
    equal_share: float
    made_of: tuple[str, ...]
    saturates: bool = False


class Parting(msgspec.Struct, frozen=True):
    """Two back ends on one graph. `first`: the first tensor that is low while all that it is made of is not, or the
    first ids that differ; `steepest`: the one with the largest drop."""

    graph: str
    reference: str
    candidate: str
    feeds: int
    tensors: tuple[TensorParting, ...]
    first: str | None
    steepest: str | None
    not_compared: tuple[str, ...]  # tensors that a side does not have


def open_subject(run: Path, graph: str, feeds: int, pattern: str = "*") -> Subject:
    """A graph of a run folder with its first `feeds` sample inputs; inner tensors whose names match `pattern`.

    Raises:
        HycoError: no such graph.
        ArtifactError: an artifact is missing or damaged.
    """
    if graph not in GRAPHS:
        raise HycoError(f"unknown graph {graph!r}", f"graphs: {', '.join(GRAPHS)}")
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


# ---- back ends: real values of every tensor they have, one mapping a feed


def values_of(subject: Subject, source: str, target: Target, log: Path) -> list[dict[str, np.ndarray]]:
    """What the back end `source` computes; a path is a folder of files from a phone.

    Raises:
        HycoError: no such back end or folder.
        CompileError: the graph cannot be compiled or opened.
    """
    run: dict[str, Callable[[], list[dict[str, np.ndarray]]]] = {
        FLOAT: lambda: _float_values(subject),
        INTEGER: lambda: _session_values(subject, ReferenceSession(probed(subject), data_folder=subject.model.parent)),
        NPU: lambda: _npu_values(subject, target, log),
    }
    if source in run:
        return run[source]()
    if not Path(source).exists():
        known = f"give {', '.join(run)}, or a folder with outputs from a phone"
        raise HycoError(f"{source!r} is neither a back end nor a folder", known)
    return recorded_values(subject, Path(source))


def probed(subject: Subject) -> bytes:
    """The graph with its inner tensors as further outputs, serialised without its external data."""
    return with_outputs(onnx.load(subject.model, load_external_data=False), subject.inner).SerializeToString()


def _session_values(subject: Subject, session: GraphSession) -> list[dict[str, np.ndarray]]:
    try:
        return [to_real(subject.tensors, session.run(feed)) for feed in subject.feeds]
    finally:
        session.close()


def _float_values(subject: Subject) -> list[dict[str, np.ndarray]]:
    return [_float_pass(subject, to_real(subject.spec.inputs, feed)) for feed in subject.feeds]


def _float_pass(subject: Subject, feeds: Arrays) -> dict[str, np.ndarray]:
    from hyco_export.models.head.static_pass import open_float_head
    from hyco_export.models.slm.static_pass import FloatSlm
    from hyco_export.models.torch_ops import TorchWeights

    seen: dict[str, np.ndarray] = {}

    def observe(name: str, values: torch.Tensor) -> None:
        seen[name] = values.numpy()

    if subject.name == HEAD_GRAPH:
        outputs = open_float_head(subject.run).draft(feeds, observe)
        return {**seen, **{spec.name: outputs[spec.name].reshape(spec.shape) for spec in subject.spec.outputs}}
    network, weights = read_slm(subject.run / SLM / WEIGHTS_FILE)
    slm = FloatSlm(network, TorchWeights(weights))
    outputs = slm.prefill(feeds, observe) if subject.name == SLM_PREFILL_GRAPH else slm.tree(feeds, observe)
    return {**seen, **outputs}


def _npu_values(subject: Subject, target: Target, log: Path) -> list[dict[str, np.ndarray]]:
    from hyco_export.graph.qnn import open_context

    with tempfile.TemporaryDirectory() as name:
        context_model = write_probe(subject, Path(name), target, log)
        return _session_values(subject, open_context(context_model, target, log))


def write_probe(subject: Subject, folder: Path, target: Target, log: Path) -> Path:
    """A compiled pair of the graph with its inner tensors as outputs; the .onnx of it.

    Raises:
        CompileError: the compiler refuses it.
    """
    from hyco_export.graph.qnn import compile_context

    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        model = place / subject.model.name
        model.write_bytes(probed(subject))
        for data in subject.model.parent.glob("*.data"):
            (place / data.name).symlink_to(data.resolve())
        return compile_context(model, folder, f"{subject.name}_probe", target, log).context_model


def write_inputs(subject: Subject, folder: Path) -> None:
    """The inputs as raw files in native types, and `input_list.txt` for qnn-net-run."""
    lines = []
    for number, feed in enumerate(subject.feeds):
        place = folder / f"inputs_{number}"
        place.mkdir(parents=True, exist_ok=True)
        for name, values in feed.items():
            np.ascontiguousarray(values).tofile(place / f"{name}.raw")
        lines.append(" ".join(f"{name}:={place.name}/{name}.raw" for name in feed))
    (folder / "input_list.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


def recorded_values(subject: Subject, folder: Path) -> list[dict[str, np.ndarray]]:
    """Outputs from a phone: `<n>.npz`, or `Result_<n>/TENSOR.raw` as qnn-net-run writes them, for feed n from 0.

    Integers are read by the tensor's encoding, floats as real values. A tensor that is not there is left out.

    Raises:
        ArtifactError: nothing is there for a feed, or a file has another size or type than its tensor.
    """
    found = []
    for number in range(len(subject.feeds)):
        arrays = _recorded(subject, folder, number)
        if not arrays:
            raise ArtifactError(
                f"{folder} holds no outputs of feed {number}",
                f"name them {number}.npz or Result_{number}/TENSOR.raw; or compare fewer with --feeds",
            )
        found.append(arrays)
    return found


def _recorded(subject: Subject, folder: Path, number: int) -> dict[str, np.ndarray]:
    archive = folder / f"{number}.npz"
    values: dict[str, np.ndarray] = {}
    if archive.is_file():
        from hyco_export.workbench.files import read_file

        read_file(archive)  # refuses what would unpack to more than it may, or runs code
        with np.load(archive, allow_pickle=False) as arrays:
            values = {
                tensor.name: _real(tensor, arrays[tensor.name]) for tensor in subject.tensors if tensor.name in arrays
            }
        return values
    for tensor in subject.tensors:
        for name in (f"{tensor.name}.raw", f"{tensor.name}_native.raw", f"{tensor.name.replace('.', '_')}.raw"):
            path = folder / f"Result_{number}" / name
            if path.is_file():
                values[tensor.name] = _real(tensor, _from_raw(path, tensor))
                break
    return values


def _from_raw(path: Path, tensor: TensorSpec) -> np.ndarray:
    """Native integers, or float32 where the file is as large as those."""
    count, data = int(np.prod(tensor.shape)), path.read_bytes()
    for dtype in (tensor.dtype, "float32"):
        if len(data) == count * np.dtype(dtype).itemsize:
            return np.frombuffer(data, dtype)
    raise ArtifactError(
        f"{path} has {len(data):,} B, {tensor.name} is {tensor.dtype} {list(tensor.shape)}", "fetch it again"
    )


def _real(tensor: TensorSpec, values: np.ndarray) -> np.ndarray:
    if values.size != int(np.prod(tensor.shape)):
        raise ArtifactError(
            f"{tensor.name} came back as {list(values.shape)}, it is {list(tensor.shape)}", "see which graph was run"
        )
    shaped = values.reshape(tensor.shape)
    integers = shaped.dtype.kind in "iu" and tensor.encoding is not None
    return tensor.encoding.dequantize(shaped) if integers and tensor.encoding else shaped


# ---- the comparison


def compare_values(
    subject: Subject, names: tuple[str, str], wanted: Sequence[Arrays], found: Sequence[Arrays]
) -> Parting:
    """Tensor by tensor; `names` of reference and candidate."""
    common = [tensor for tensor in subject.tensors if tensor.name in wanted[0] and tensor.name in found[0]]
    parents = _parents(subject, {tensor.name for tensor in common})
    measured: dict[str, TensorParting] = {}
    for tensor in common:
        pairs = [(left[tensor.name], right[tensor.name]) for left, right in zip(wanted, found, strict=True)]
        above = [measured[name].sqnr_db for name in parents[tensor.name] if name in measured]
        measured[tensor.name] = _compared(tensor, pairs, parents[tensor.name], above)
    tensors = tuple(measured.values())
    missing = tuple(tensor.name for tensor in subject.tensors if tensor.name not in measured)
    return Parting(subject.name, *names, len(wanted), tensors, _first(tensors, measured), _steepest(tensors), missing)


def _compared(
    tensor: TensorSpec,
    pairs: Sequence[tuple[np.ndarray, np.ndarray]],
    made_of: tuple[str, ...],
    above: Sequence[float | None],
) -> TensorParting:
    encoding = tensor.encoding
    if encoding is None:
        equal = float(np.mean([np.mean(left == right) for left, right in pairs]))
        return TensorParting(tensor.name, None, None, equal, made_of)
    equal = float(np.mean([np.mean(encoding.quantize(left) == encoding.quantize(right)) for left, right in pairs]))
    signal = sum(float(np.sum(np.asarray(left, np.float64) ** 2)) for left, _ in pairs)
    noise = sum(float(np.sum((np.asarray(left, np.float64) - right) ** 2)) for left, right in pairs)
    own = decibels(signal, noise)
    known = [value for value in above if value is not None]
    drop = min(HEALTHY_DB, *known) - own if known else None
    return TensorParting(tensor.name, own, drop, equal, made_of, only_feeds_tanh(tensor.name))


def _parents(subject: Subject, known: set[str]) -> dict[str, tuple[str, ...]]:
    """For each tensor the nearest compared ones that it is made of."""
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


def _first(tensors: Sequence[TensorParting], measured: Mapping[str, TensorParting]) -> str | None:
    for tensor in tensors:
        low = tensor.equal_share < 1.0 if tensor.sqnr_db is None else tensor.sqnr_db < LOW_DB
        made_of = (measured[name] for name in tensor.made_of if name in measured)
        above = [one.sqnr_db for one in made_of if not one.saturates]
        if low and not tensor.saturates and all(value is None or value >= LOW_DB for value in above):
            return tensor.name
    return None


def _steepest(tensors: Sequence[TensorParting]) -> str | None:
    drops = [(one.drop_db, one.name) for one in tensors if one.drop_db is not None and not one.saturates]
    drop, name = max(drops, default=(0.0, ""))
    return name if drop >= DROP_DB else None
