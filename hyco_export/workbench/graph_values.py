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

from hyco_export.bundle.raw_files import input_list, read_tensor, write_raw
from hyco_export.core.artifact import SLM
from hyco_export.core.device_spec import HEAD_GRAPH, SLM_PREFILL_GRAPH, GraphSession, TensorSpec, to_real
from hyco_export.core.network.weight_files import WEIGHTS_FILE, read_slm
from hyco_export.core.targets import Target
from hyco_export.errors import ArtifactError
from hyco_export.graph.parity import ReferenceSession
from hyco_export.graph.qnn import compile_context, open_context
from hyco_export.graph.slm_graphs import with_outputs
from hyco_export.models.head.static_pass import open_float_head
from hyco_export.models.slm.static_pass import FloatSlm
from hyco_export.models.torch_ops import TorchWeights
from hyco_export.workbench.bisect import FLOAT, INTEGER, NPU, Arrays, Subject, require_source

INPUT_LIST = "input_list.txt"


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
    require_source(source)
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


def write_inputs(subject: Subject, folder: Path) -> Path:
    """The inputs as raw files in native types, and their list for qnn-net-run; the list's path."""
    listed = folder / INPUT_LIST
    runs = [write_raw(folder, f"inputs_{number}", feed) for number, feed in enumerate(subject.feeds)]
    listed.write_text(input_list(runs), encoding="utf-8")
    return listed


def recorded_values(subject: Subject, folder: Path) -> list[dict[str, np.ndarray]]:
    """Outputs from a phone: `<n>.npz`, or raw files in `Result_<n>/` as qnn-net-run writes them, for feed n from 0.

    Integers are read by the tensor's encoding, floats as real values. A tensor that is not there is left out.

    Raises:
        ArtifactError: nothing is there for a feed, or a file has another size or type than its tensor.
    """
    found = []
    for number in range(len(subject.feeds)):
        places = (folder / f"{number}.npz", folder / f"Result_{number}")
        reads = {tensor: read_tensor(places, tensor) for tensor in subject.tensors}
        unreadable = next((read.problem for read in reads.values() if read.problem and not read.missing), "")
        if unreadable:
            raise ArtifactError(f"feed {number} of {folder}: {unreadable}", "see which graph was run, fetch it again")
        arrays = {tensor.name: _real(tensor, read.values) for tensor, read in reads.items() if read.values is not None}
        if not arrays:
            raise ArtifactError(
                f"{folder} holds no outputs of feed {number}",
                f"name them {number}.npz or Result_{number}/TENSOR.raw; or compare fewer with --feeds",
            )
        found.append(arrays)
    return found


def _real(tensor: TensorSpec, values: np.ndarray) -> np.ndarray:
    if values.dtype.kind == "f" or tensor.encoding is None:
        return values
    return tensor.encoding.dequantize(values)
