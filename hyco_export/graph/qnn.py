"""Compile QDQ graphs into Hexagon context binaries and run them: the only file that touches onnxruntime-qnn.

`compile_context` and `open_context` work in worker processes and are for the rest of the package; functions with `here`
in their name and `VendorSession` are what those workers run. The artifacts are ONNX Runtime EPContext pairs
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
from typing import Self

import msgspec
import numpy as np
import onnx
import onnxruntime as ort

from hyco_export.core.device_spec import GraphSpec, TensorSpec
from hyco_export.core.targets import Target
from hyco_export.errors import CompileError
from hyco_export.graph import qnn_process
from hyco_export.graph.context_check import PROVIDER, check_context, require_feeds
from hyco_export.graph.io_spec import read_io_spec
from hyco_export.graph.qnn_errors import read_refusals
from hyco_export.graph.qnn_process import ContextInfo, Worker
from hyco_export.graph.smaller_binaries import TwoBitNames, build_backend

FALLBACK_REFUSED = "the NPU cannot run all of"  # how qnn_errors words it
SHOWN_REFUSALS = 8  # operators named in an error message
FINALIZATION_MODE = 3  # level 1 was seen to lose all accuracy (0.9 dB); 2, 3 and the default were right
COMPILATION_OPTIONS = {
    "htp_graph_finalization_optimization_mode": str(FINALIZATION_MODE),
    "enable_htp_prepare_only": "1",  # same bytes, and the compiler's memory is freed before saving ends
}
CPU_REFUSED = "session.disable_cpu_ep_fallback"
VERBOSE, WARNING = 0, 2  # ONNX Runtime's log severities


def is_fallback(error: BaseException) -> bool:
    """Whether a graph was refused because parts of it would run on the CPU."""
    return isinstance(error, CompileError) and FALLBACK_REFUSED in error.message


def named_fallback(job: qnn_process.CompileJob, name: str, log: Path) -> CompileError:
    """The error that names the nodes of graph `name` that the NPU cannot run: compiled again with a verbose log."""
    trial_log = log.with_name(f"{log.stem}.fallback.log")
    with tempfile.TemporaryDirectory() as folder, Worker(trial_log) as worker:
        place = str(Path(folder) / "trial_ctx.onnx")
        trial = msgspec.structs.replace(job, context_model=place, explain_fallback=True, two_bit=None)
        with contextlib.suppress(CompileError):  # what was refused is in the log all the same
            worker.ask(trial, qnn_process.Compiled, name)
    refusals = read_refusals(trial_log.read_text(encoding="utf-8", errors="replace"))
    shown = "; ".join(refusals[:SHOWN_REFUSALS]) + ("; ..." if len(refusals) > SHOWN_REFUSALS else "")
    return CompileError(
        f"the NPU cannot run all of {name}: {len(refusals)} operator(s) would fall back to the CPU: {shown}",
        f"change these operators or their widths; the provider's words are in {trial_log}",
    )


@dataclass(frozen=True)
class CompiledContext:
    """One compiled graph and what compiling it cost."""

    context_model: Path  # x_ctx.onnx
    binary: Path  # the .bin beside it
    spec: GraphSpec  # inputs and outputs, checked against the binary
    info: ContextInfo  # what the binary says about itself
    wall_s: float
    cpu_s: float
    peak_rss_bytes: int  # of the compiling process
    binary_bytes: int
    two_bit_weights: int  # tensors stored in 2 bits


def compile_context(
    model: Path,
    out_dir: Path,
    name: str,
    target: Target,
    log: Path,
    two_bit: qnn_process.TwoBit | None = None,
    wheel: Path | None = None,
) -> CompiledContext:
    """Compile the QDQ graph `model` for `target` into `out_dir`/`name`_ctx.onnx and its binary, and check the result.

    The same model file name, bytes and target give the same bytes: the graph's name inside the binary is a hash of the
    model's file name, so the folder does not matter.

    Args:
        model: QDQ ONNX file (external data beside it).
        log: what the vendor's libraries print is appended here.
        two_bit: weights of the graph to store in 2 bits (`two_bit_backend`); the INT4 integers in the graph must
            lie in [-2, 1].
        wheel: a folder with another onnxruntime-qnn to compile with (`graph.qairt_wheel`).

    Raises:
        CompileError: the compiler refused the graph (nodes that would fall back to the CPU are listed), crashed, or
            compiled something else than was asked for.
    """
    if not model.is_file():
        raise CompileError(f"{model} does not exist", "build the stage before this one: hyco-export run")
    spec = read_io_spec(onnx.load(model, load_external_data=False), name)
    context_model = out_dir / f"{name}_ctx.onnx"
    job = qnn_process.CompileJob(str(model.resolve()), str(context_model.resolve()), target, two_bit=two_bit)
    _discard(context_model)
    try:
        with Worker(log, wheel=wheel) as worker:
            cost = worker.ask(job, qnn_process.Compiled, subject=name)
        _require_narrowed(cost.two_bit_weights, two_bit, name)
        binary, info = check_context([context_model], [spec], target)
    except BaseException as error:
        _discard(context_model)
        if is_fallback(error):
            raise named_fallback(job, name, log) from error
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
        two_bit_weights=cost.two_bit_weights,
    )


def two_bit_backend(cache: Path | None = None) -> Path:
    """The backend for `qnn_process.TwoBit`, built on first use; `cache` in place of the user's cache folder.

    Raises:
        CompileError: it cannot be built, for example without a C compiler.
    """
    return build_backend(*vendor_libraries(), cache)


def _require_narrowed(found: int, two_bit: qnn_process.TwoBit | None, name: str) -> None:
    if two_bit is not None and found != len(two_bit.names):
        raise CompileError(
            f"{found} of {len(two_bit.names)} weights of {name} went into the binary with 2 bits",
            "a weight's integers leave [-2, 1], or the vendor's library has another layout: set "
            "$.compile.two_bit_weights to false",
        )


def _discard(context_model: Path) -> None:
    """Remove a pair left by an earlier or refused compilation: the provider saves what it can before it refuses."""
    for path in (context_model, *context_model.parent.glob(f"{context_model.stem}_*.bin")):
        path.unlink(missing_ok=True)


class ContextSession:
    """An open context binary in a worker process: a `GraphSession` of integers in, integers out."""

    def __init__(self, worker: Worker, opened: qnn_process.Opened, name: str) -> None:
        self._worker, self._name = worker, name
        self.inputs, self.outputs = opened.inputs, opened.outputs

    def run(self, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Outputs by name.

        Raises:
            CompileError: feeds do not fit the graph, or the run failed.
        """
        require_feeds(feeds, self.inputs, self._name)
        reply = self._worker.ask(qnn_process.RunJob(qnn_process.pack_arrays(feeds)), qnn_process.Outputs, self._name)
        return qnn_process.unpack_arrays(reply.arrays)

    def close(self) -> None:
        """End the worker process."""
        self._worker.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def open_context(
    context_model: Path, target: Target, log: Path | None = None, wheel: Path | None = None
) -> ContextSession:
    """Load the binary of `context_model` for `target` in a process of its own, which may use another onnxruntime-qnn.

    Raises:
        CompileError: the binary is missing, damaged or for another target, or its loading crashed.
    """
    if not context_model.is_file():
        raise CompileError(f"context model {context_model} does not exist", "compile it: hyco-export compile")
    worker = Worker(log, wheel=wheel)
    try:
        job = qnn_process.OpenJob(str(context_model.resolve()), target)
        return ContextSession(worker, worker.ask(job, qnn_process.Opened, context_model.name), context_model.name)
    except BaseException:
        worker.kill()
        raise


def system_library() -> Path:
    """The vendor's library that reads context binaries."""
    import onnxruntime_qnn

    return Path(onnxruntime_qnn.LIB_DIR_FULL_PATH) / "libQnnSystem.so"


def vendor_libraries() -> tuple[Path, str]:
    """The folder of the vendor's libraries, and their version."""
    import onnxruntime_qnn

    return Path(onnxruntime_qnn.LIB_DIR_FULL_PATH), onnxruntime_qnn.build_and_package_info.qnn_version


def compile_here(job: qnn_process.CompileJob) -> int:
    """Compile in this process; returns how many weights were stored in 2 bits."""
    names = _names(job.two_bit)
    entries = {**_compilation(job.context_model), CPU_REFUSED: "0" if job.explain_fallback else "1"}
    severity = VERBOSE if job.explain_fallback else WARNING
    _compiling_session(Path(job.model), job.target, entries, job.two_bit, severity)
    return names.narrowed() if names else 0


def compile_shared_here(job: qnn_process.SharedCompileJob) -> int:
    """Compile several graphs into one binary in this process; returns how many of all weights were stored in 2 bits."""
    names = _names(job.two_bit)
    sessions = []  # each keeps its graph open until the last one writes the binary
    for model, context_model in zip(job.models, job.context_models, strict=True):
        last = context_model == job.context_models[-1]
        sharing = {"ep.share_ep_contexts": "1", "ep.stop_share_ep_contexts": "1" if last else "0"}
        entries = {**_compilation(context_model), CPU_REFUSED: "1", **sharing}
        sessions.append(_compiling_session(Path(model), job.target, entries, job.two_bit, WARNING))
    return names.narrowed() if names else 0


def _names(two_bit: qnn_process.TwoBit | None) -> TwoBitNames | None:
    return None if two_bit is None else TwoBitNames(Path(two_bit.library), two_bit.names)


def _compilation(context_model: str) -> dict[str, str]:
    """Session entries that make a session a compilation."""
    return {"ep.context_enable": "1", "ep.context_embed_mode": "0", "ep.context_file_path": context_model}


def _compiling_session(
    model: Path, target: Target, entries: Mapping[str, str], two_bit: qnn_process.TwoBit | None, log_severity: int
) -> ort.InferenceSession:
    os.chdir(model.parent)  # the graph's name is a hash of the path as given: give the file name alone
    backend = {} if two_bit is None else {"backend_path": two_bit.library}
    return _vendor_session(Path(model.name), target, entries, {**COMPILATION_OPTIONS, **backend}, log_severity)


class VendorSession:
    """An open context binary in this process."""

    def __init__(self, context_model: Path, target: Target) -> None:
        entries = {CPU_REFUSED: "1"}
        self._session = _vendor_session(context_model, target, entries, {}, WARNING)
        self.inputs = tuple(_tensor_spec(node) for node in self._session.get_inputs())
        self.outputs = tuple(_tensor_spec(node) for node in self._session.get_outputs())
        self._output_names = [spec.name for spec in self.outputs]

    def run(self, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Outputs by name."""
        return dict(zip(self._output_names, self._session.run(None, dict(feeds)), strict=True))


def _vendor_session(
    model: Path, target: Target, entries: Mapping[str, str], options: Mapping[str, str], log_severity: int
) -> ort.InferenceSession:
    """A session on the HTP; `target` is always given, for without it the provider picks one silently."""
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


def _devices() -> list[ort.OrtEpDevice]:
    """The provider's devices: the NPU where there is one, else what it offers for emulation."""
    found = [device for device in ort.get_ep_devices() if device.ep_name == PROVIDER]
    npus = [device for device in found if device.device.type == ort.OrtHardwareDeviceType.NPU]
    return npus or found


def _tensor_spec(node: ort.NodeArg) -> TensorSpec:
    """ONNX Runtime says `tensor(uint16)`; inside is numpy's name."""
    return TensorSpec(node.name, tuple(node.shape), node.type.removeprefix("tensor(").removesuffix(")"))
