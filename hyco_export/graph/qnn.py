"""Compile QDQ graphs into Hexagon context binaries and run them: the only file that touches onnxruntime-qnn.

`compile_context` and `open_context` do it in worker processes and are what the rest of the package uses; the functions
with `here` in their name and `VendorSession` are what those workers run. The artifacts are ONNX Runtime EPContext pairs
(a small .onnx and a .bin), not Genie bundles. On x86 the vendor's HTP library emulates the NPU; on a Snapdragon host
the same calls use the NPU itself (not proved here).
"""

import contextlib
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

import numpy as np

from hyco_export.core.graphspec import GraphSpec, TensorSpec
from hyco_export.core.targets import Target
from hyco_export.errors import CompileError
from hyco_export.graph import frames
from hyco_export.graph.context_check import check_context, require_feeds
from hyco_export.graph.ep_context import PROVIDER
from hyco_export.graph.frames import ContextInfo
from hyco_export.graph.interface import read_interface
from hyco_export.graph.qnn_errors import read_refusals
from hyco_export.graph.worker import Worker

if TYPE_CHECKING:
    import onnxruntime as ort

FINALIZATION_MODE = 3  # level 1 was seen to lose all accuracy (0.9 dB); 2, 3 and the default were right
FALLBACK_REFUSED = "the NPU cannot run all of"  # how qnn_errors words it
SHOWN_REFUSALS = 8  # operators named in an error message
VERBOSE, WARNING = 0, 2  # ONNX Runtime's log severities


@dataclass(frozen=True)
class CompiledContext:
    """One compiled graph and what it took."""

    context_model: Path  # x_ctx.onnx
    binary: Path  # the .bin beside it
    spec: GraphSpec  # inputs and outputs, checked against the binary
    info: ContextInfo  # what the binary says about itself
    wall_s: float
    cpu_s: float
    peak_rss_bytes: int  # of the compiling process
    binary_bytes: int


def compile_context(model: Path, out_dir: Path, name: str, target: Target, log: Path) -> CompiledContext:
    """Compile the QDQ graph `model` for `target` into `out_dir`/`name`_ctx.onnx and its binary, and check the result.

    The same model file name, bytes and target give the same bytes: the graph's name inside the binary is a hash of the
    model's file name, so the folder does not matter.

    Args:
        model: QDQ ONNX file (external data beside it).
        log: what the vendor's libraries print is appended here.

    Raises:
        CompileError: the compiler refused the graph (nodes that would fall back to the CPU are listed), crashed, or
            compiled something else than was asked for.
    """
    import onnx

    if not model.is_file():
        raise CompileError(f"{model} does not exist", "build the stage before this one: hyco-export run")
    spec = read_interface(onnx.load(model, load_external_data=False), name)
    context_model = out_dir / f"{name}_ctx.onnx"
    job = frames.CompileJob(str(model.resolve()), str(context_model.resolve()), target)
    _discard(context_model)
    try:
        with Worker(log) as worker:
            cost = worker.ask(job, frames.Compiled, subject=name)
        binary, info = check_context(context_model, spec, target)
    except BaseException as error:
        _discard(context_model)
        if isinstance(error, CompileError) and FALLBACK_REFUSED in error.message:
            raise _named_fallback(job, name, log) from error
        raise
    return CompiledContext(
        context_model=context_model,
        binary=binary,
        spec=spec,
        info=info,
        wall_s=cost.wall_s,
        cpu_s=cost.cpu_s,
        peak_rss_bytes=cost.peak_rss_bytes,
        binary_bytes=binary.stat().st_size,
    )


def _discard(context_model: Path) -> None:
    """Remove a pair that an earlier or refused compilation left: the provider saves what it could before it refuses."""
    for path in (context_model, *context_model.parent.glob(f"{context_model.stem}_*.bin")):
        path.unlink(missing_ok=True)


def _named_fallback(job: frames.CompileJob, name: str, log: Path) -> CompileError:
    """The error that says which nodes the NPU cannot run: compile once more, let the provider talk, and listen."""
    trial_log = log.with_name(f"{log.stem}.fallback.log")
    with tempfile.TemporaryDirectory() as folder, Worker(trial_log) as worker:
        trial = frames.CompileJob(job.model, str(Path(folder) / "trial_ctx.onnx"), job.target, explain_fallback=True)
        with contextlib.suppress(CompileError):  # what was refused is in the log all the same
            worker.ask(trial, frames.Compiled, name)
    refusals = read_refusals(trial_log.read_text(encoding="utf-8", errors="replace"))
    shown = "; ".join(refusals[:SHOWN_REFUSALS]) + ("; ..." if len(refusals) > SHOWN_REFUSALS else "")
    return CompileError(
        f"the NPU cannot run all of {name}: {len(refusals)} operator(s) would fall back to the CPU: {shown}",
        f"change these operators or their widths; the provider's words are in {trial_log}",
    )


class ContextSession:
    """An open context binary in a worker process: a `GraphSession` of integers in, integers out."""

    def __init__(self, worker: Worker, opened: frames.Opened, name: str) -> None:
        self._worker, self._name = worker, name
        self.inputs, self.outputs = opened.inputs, opened.outputs

    def run(self, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Outputs by name.

        Raises:
            CompileError: feeds do not fit the graph, or the run failed.
        """
        require_feeds(feeds, self.inputs, self._name)
        reply = self._worker.ask(frames.RunJob(frames.pack_arrays(feeds)), frames.Outputs, self._name)
        return frames.unpack_arrays(reply.arrays)

    def close(self) -> None:
        """End the worker process."""
        self._worker.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def open_context(context_model: Path, target: Target, log: Path | None = None) -> ContextSession:
    """Load the binary of `context_model` for `target` in a process of its own.

    Raises:
        CompileError: the binary is missing, damaged or for another target, or its loading crashed.
    """
    if not context_model.is_file():
        raise CompileError(f"context model {context_model} does not exist", "compile it: hyco-export compile")
    worker = Worker(log)
    try:
        job = frames.OpenJob(str(context_model.resolve()), target)
        return ContextSession(worker, worker.ask(job, frames.Opened, context_model.name), context_model.name)
    except BaseException:
        worker.kill()
        raise


def system_library() -> Path:
    """The vendor's library that reads context binaries."""
    import onnxruntime_qnn

    return Path(onnxruntime_qnn.LIB_DIR_FULL_PATH) / "libQnnSystem.so"


def compile_here(model: Path, context_model: Path, target: Target, explain_fallback: bool) -> None:
    """Compile in this process; with `explain_fallback`, let nodes fall back and have the provider log why."""
    entries = {
        "ep.context_enable": "1",
        "ep.context_embed_mode": "0",
        "ep.context_file_path": str(context_model),
        "session.disable_cpu_ep_fallback": "0" if explain_fallback else "1",
    }
    options = {
        "htp_graph_finalization_optimization_mode": str(FINALIZATION_MODE),
        "enable_htp_prepare_only": "1",  # same bytes, and the compiler's memory is freed before saving ends
    }
    os.chdir(model.parent)  # the graph's name is a hash of the path as given: give the file name alone
    _vendor_session(Path(model.name), target, entries, options, VERBOSE if explain_fallback else WARNING)


class VendorSession:
    """An open context binary in this process."""

    def __init__(self, context_model: Path, target: Target) -> None:
        entries = {"session.disable_cpu_ep_fallback": "1"}
        self._session = _vendor_session(context_model, target, entries, {}, WARNING)
        self.inputs = tuple(_tensor_spec(node) for node in self._session.get_inputs())
        self.outputs = tuple(_tensor_spec(node) for node in self._session.get_outputs())
        self._output_names = [spec.name for spec in self.outputs]

    def run(self, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Outputs by name."""
        return dict(zip(self._output_names, self._session.run(None, dict(feeds)), strict=True))


def _vendor_session(
    model: Path, target: Target, entries: Mapping[str, str], options: Mapping[str, str], log_severity: int
) -> "ort.InferenceSession":
    """A session on the HTP; `target` is always given, for without it the provider picks one silently."""
    import onnxruntime as ort
    import onnxruntime_qnn

    if not any(device.ep_name == PROVIDER for device in ort.get_ep_devices()):  # it registers once a process
        ort.register_execution_provider_library(PROVIDER, onnxruntime_qnn.get_library_path())
    settings = ort.SessionOptions()
    settings.log_severity_level = log_severity
    for key, value in entries.items():
        settings.add_session_config_entry(key, value)
    settings.add_provider_for_devices(
        _devices(),
        {
            "backend_path": onnxruntime_qnn.get_qnn_htp_path(),
            "htp_arch": str(target.htp_arch),
            "soc_model": str(target.soc_model),
            "vtcm_mb": str(target.vtcm_mb),
            "offload_graph_io_quantization": "0",
            **options,
        },
    )
    return ort.InferenceSession(str(model), settings)


def _devices() -> list["ort.OrtEpDevice"]:
    """The provider's devices: the NPU where there is one, else what it offers for emulation."""
    import onnxruntime as ort

    found = [device for device in ort.get_ep_devices() if device.ep_name == PROVIDER]
    npus = [device for device in found if device.device.type == ort.OrtHardwareDeviceType.NPU]
    return npus or found


def _tensor_spec(node: "ort.NodeArg") -> TensorSpec:
    """ONNX Runtime says `tensor(uint16)`; inside is numpy's name."""
    return TensorSpec(node.name, tuple(node.shape), node.type.removeprefix("tensor(").removesuffix(")"))
