"""A bundle's graphs and models, opened with onnxruntime alone: what `driver.pyz` runs.

Back ends: `cpu` computes the integer graphs as they are written, `qnn` the context binaries by onnxruntime-qnn, on the
NPU or in the vendor's emulator on x86.
"""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnxruntime as ort

from hyco_export.bundle.spec import Bundle
from hyco_export.core.device_spec import HEAD_GRAPH, SLM_PREFILL_GRAPH, SLM_TREE_GRAPH, GraphSession
from hyco_export.core.keepset import read_keepset
from hyco_export.core.network.host import read_attention_sink
from hyco_export.core.tables import HostTables
from hyco_export.core.token_bridge import read_bridge
from hyco_export.device.backends import Device
from hyco_export.device.head import GraphHead
from hyco_export.device.slm import BridgedSlm, GraphSlm
from hyco_export.errors import CompileError

PROVIDER = "QNNExecutionProvider"
BACKENDS = ("cpu", "qnn")
ERROR_SEVERITY = 3


class BundleGraph:
    """A `GraphSession` over one graph of a bundle.

    Args:
        folder: the bundle's.
        bundle: what is in it.
        name: the graph.
        backend: one of `BACKENDS`.

    Raises:
        CompileError: onnxruntime cannot open it, or onnxruntime-qnn is missing.
    """

    def __init__(self, folder: Path, bundle: Bundle, name: str, backend: str) -> None:
        graph = bundle.graphs[name]
        path = folder / (graph.model if backend == "qnn" else graph.integer_graph)
        try:
            self._session = _npu_session(path, bundle) if backend == "qnn" else _cpu_session(path)
        except Exception as error:  # onnxruntime's exceptions share no base class of their own
            words = " ".join(str(error).split())
            raise CompileError(
                f"{path} cannot be opened: {words}", "go through the loading checklist of BUNDLE.md, chapter 1"
            ) from error
        self._outputs = [tensor.name for tensor in graph.outputs]

    def run(self, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Outputs by name."""
        return dict(zip(self._outputs, self._session.run(self._outputs, dict(feeds)), strict=True))

    def close(self) -> None:
        """Nothing to do: memory is freed with the object."""


def assemble_device(folder: Path, bundle: Bundle, graphs: Mapping[str, GraphSession]) -> Device:
    """Head and SLM over opened graphs, by name.

    Raises:
        ArtifactError: a table is missing or damaged.
    """
    keepset = read_keepset((folder / bundle.keepset).parent)
    head = GraphHead(bundle.head_spec, keepset.ids, graphs[HEAD_GRAPH])
    sink = read_attention_sink(folder / bundle.slm_sink) if bundle.slm_sink else {}
    tables = HostTables(folder / bundle.slm_tables)
    slm = GraphSlm(bundle.slm_spec, tables, graphs[SLM_TREE_GRAPH], graphs[SLM_PREFILL_GRAPH], sink)
    if not bundle.slm_bridge:
        return Device(head, slm, bundle.head_spec.handoff, keepset.ids)
    bridge = read_bridge(folder / bundle.slm_bridge)
    return Device(head, BridgedSlm(slm, bridge), bundle.head_spec.handoff, bridge.verifier_ids)


def _cpu_session(path: Path) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL  # else 4-bit products are others
    options.log_severity_level = ERROR_SEVERITY
    return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def _npu_session(path: Path, bundle: Bundle) -> ort.InferenceSession:
    import onnxruntime_qnn as plugin  # a device without an NPU need not have it

    if not any(device.ep_name == PROVIDER for device in ort.get_ep_devices()):  # it registers once a process
        ort.register_execution_provider_library(PROVIDER, plugin.get_library_path())
    found = [device for device in ort.get_ep_devices() if device.ep_name == PROVIDER]
    npus = [device for device in found if device.device.type == ort.OrtHardwareDeviceType.NPU]
    options = ort.SessionOptions()
    options.log_severity_level = ERROR_SEVERITY
    options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    target = bundle.target
    options.add_provider_for_devices(
        npus or found,
        {
            "backend_path": plugin.get_qnn_htp_path(),
            "htp_arch": str(target.htp_arch),
            "soc_model": str(target.soc_model),
            "vtcm_mb": str(target.vtcm_mb),
            "offload_graph_io_quantization": "0",
        },
    )
    return ort.InferenceSession(str(path), options)
