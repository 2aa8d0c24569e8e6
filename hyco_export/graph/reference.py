"""Runs a QDQ graph on the CPU exactly as written: the reference every compiled graph is compared with.

ONNX Runtime's own optimisations are off: with them a 4-bit DequantizeLinear and its MatMul become 8-bit compute, which
was seen to be 36 dB away from the graph's meaning. Knows ONNX Runtime; no NPU.
"""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnxruntime as ort

from hyco_export.core.graphspec import TensorSpec
from hyco_export.errors import CompileError

DATA_FOLDER_KEY = "session.model_external_initializers_file_folder_path"
ERROR_SEVERITY = 3  # ONNX Runtime's warnings about foreign nodes say nothing here
# From the second run on ONNX Runtime plans one block for all tensors of a run, beside what the first run allocated: a
# tenth of a small graph's time won, and 1.5 GB for a head of real size
LARGE_MODEL_BYTES = 5_000_000


class ReferenceSession:
    """A `GraphSession` on the CPU; integers (or floats, for a float graph) in and out by name.

    Args:
        model: ONNX file (external data beside it) or the serialised model.
        threads: of one operator.
        data_folder: where the external data of a serialised model lies, if it has some.

    Raises:
        CompileError: no such file, or not a model that ONNX Runtime can run.
    """

    def __init__(self, model: Path | bytes, threads: int = 1, data_folder: Path | None = None) -> None:
        if isinstance(model, Path) and not model.is_file():
            raise CompileError(f"{model} does not exist", "build the stage before this one: hyco-export run")
        settings = ort.SessionOptions()
        settings.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        settings.intra_op_num_threads = threads
        settings.inter_op_num_threads = 1
        settings.enable_mem_pattern = _bytes_of(model) < LARGE_MODEL_BYTES
        settings.log_severity_level = ERROR_SEVERITY
        if data_folder is not None:
            settings.add_session_config_entry(DATA_FOLDER_KEY, str(data_folder))
        name = "the graph" if isinstance(model, bytes) else str(model)
        source = model if isinstance(model, bytes) else str(model)
        try:
            self._session = ort.InferenceSession(source, settings, providers=["CPUExecutionProvider"])
        except Exception as error:  # ONNX Runtime's exceptions share no base class of their own
            words = " ".join(str(error).split())
            raise CompileError(f"ONNX Runtime cannot open {name}: {words}", "convert it again") from error
        self.inputs = tuple(_tensor_spec(node) for node in self._session.get_inputs())
        self.outputs = tuple(_tensor_spec(node) for node in self._session.get_outputs())
        self._output_names = [spec.name for spec in self.outputs]

    def run(self, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Outputs by name."""
        return dict(zip(self._output_names, self._session.run(None, dict(feeds)), strict=True))

    def close(self) -> None:
        """Nothing to release: memory goes with the object."""


def _bytes_of(model: Path | bytes) -> int:
    """Without external data: graphs that have some are large by their nodes alone."""
    return len(model) if isinstance(model, bytes) else model.stat().st_size


def _tensor_spec(node: ort.NodeArg) -> TensorSpec:
    """ONNX Runtime says `tensor(uint16)`; inside is numpy's name (`float` means float32)."""
    kind = node.type.removeprefix("tensor(").removesuffix(")")
    return TensorSpec(node.name, tuple(node.shape), {"float": "float32"}.get(kind, kind))
