"""Real values of a graph's tensors by each back end, for `bisect`, and what a phone needs to give out its own.

Back ends: the float network (`torch`), the integer graph on the CPU (`onnx-cpu`), the compiled graph in the emulator or
on this machine's NPU (`qnn`, compiled anew with its inner tensors as outputs), or a folder with what came from a phone.
A phone gives a graph's own outputs (an SLM: the K/V rows of every layer) or, from the pair of `--probe`, all tensors.
"""

import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import torch

from hyco_export.core.artifact import SLM
from hyco_export.core.device_spec import HEAD_GRAPH, SLM_PREFILL_GRAPH, GraphSession, TensorSpec, to_real
from hyco_export.core.network.weight_files import WEIGHTS_FILE, read_slm
from hyco_export.core.targets import Target
from hyco_export.errors import ArtifactError, HycoError
from hyco_export.graph.parity import ReferenceSession
from hyco_export.graph.qnn import compile_context, open_context
from hyco_export.graph.slm_graphs import with_outputs
from hyco_export.models.head.static_pass import open_float_head
from hyco_export.models.slm.static_pass import FloatSlm
from hyco_export.models.torch_ops import TorchWeights
from hyco_export.workbench.bisect import Arrays, Subject
from hyco_export.workbench.files import read_file

FLOAT, INTEGER, NPU = "torch", "onnx-cpu", "qnn"


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
    with tempfile.TemporaryDirectory() as name:
        context_model = write_probe(subject, Path(name), target, log)
        return _session_values(subject, open_context(context_model, target, log))


def write_probe(subject: Subject, folder: Path, target: Target, log: Path) -> Path:
    """A compiled pair of the graph with its inner tensors as outputs; the .onnx of it.

    Raises:
        CompileError: the compiler refuses it.
    """
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
        read_file(archive)  # refuses what would unpack to more than it may, or runs code
        with np.load(archive) as arrays:
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
