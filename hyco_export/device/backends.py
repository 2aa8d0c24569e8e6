"""Device back ends: the float networks, the QDQ graphs on the CPU, or the compiled context binaries.

A back end only chooses a `GraphSession` for each graph of a run folder; host code, rings and encodings are the same for
all. Frameworks are imported when a back end is opened, not before.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from hyco_export.core.artifact import COMPILE, HEAD, KEEPSET, SLM, SLM_SINK_FILE, artifact_name
from hyco_export.core.device_spec import (
    HEAD_GRAPH,
    HEAD_SPEC_FILE,
    SLM_PREFILL_GRAPH,
    SLM_SPEC_FILE,
    SLM_TREE_GRAPH,
    GraphSession,
    HeadSpec,
    SlmSpec,
    Spec,
    read_spec,
)
from hyco_export.core.handoff import HandoffSpec
from hyco_export.core.keepset import KeepSet, read_keepset, require_keepset
from hyco_export.core.network.host import read_attention_sink
from hyco_export.core.tables import TABLES_FILE, HostTables
from hyco_export.core.targets import DEFAULT_TARGET, find_target
from hyco_export.core.token_bridge import BRIDGE_FILE, read_bridge
from hyco_export.device.head import GraphHead
from hyco_export.device.interfaces import HeadDevice, SlmDevice
from hyco_export.device.slm import BridgedSlm, GraphSlm
from hyco_export.errors import HycoError


@dataclass(frozen=True)
class Device:
    """Both drafting models. `slm_ids` [C] are the verifier ids of the SLM's columns; `close` releases the graphs."""

    head: HeadDevice
    slm: SlmDevice
    handoff: HandoffSpec
    slm_ids: np.ndarray

    def close(self) -> None:
        """Release the graphs; a back end may hold processes."""
        self.head.close()
        self.slm.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


SlmSessions = tuple[GraphSession, GraphSession]  # tree, prefill


@dataclass(frozen=True)
class Backend:
    """How one back end opens its sessions, from a run folder and a target's name."""

    name: str
    summary: str
    head: Callable[[Path, str], GraphSession]
    slm: Callable[[Path, str], SlmSessions]


def open_device(run: Path, backend: str, target: str = DEFAULT_TARGET) -> Device:
    """Head and SLM of a run folder on one of `BACKENDS`.

    Raises:
        HycoError: see `open_head` and `open_slm`.
    """
    head = open_head(run, backend, target)
    bridge = read_bridge(run / SLM / BRIDGE_FILE) if (run / SLM / BRIDGE_FILE).exists() else None
    try:
        slm = open_slm(run, backend, target)
        if bridge is None:
            return Device(head, slm, head.spec.handoff, head.kept_ids)
        return Device(head, BridgedSlm(slm, bridge), head.spec.handoff, bridge.verifier_ids)
    except BaseException:
        head.close()
        raise


def open_head(run: Path, backend: str, target: str = DEFAULT_TARGET) -> GraphHead:
    """The head of a run folder on one of `BACKENDS`; `target` names the compiled artifact, where one is used.

    Raises:
        HycoError: no such back end.
        ArtifactError: an artifact is missing, damaged or was built with another keep set.
        CompileError: a graph or a binary cannot be opened.
    """
    chosen = find_backend(backend)
    spec, keepset = _read_part(run, HEAD, HEAD_SPEC_FILE, HeadSpec)
    return GraphHead(spec, keepset.ids, chosen.head(run, target))


def open_slm(run: Path, backend: str, target: str = DEFAULT_TARGET) -> GraphSlm:
    """The SLM of a run folder, in its own ids, on one of `BACKENDS`; `target` names the compiled artifact, if any.

    Raises:
        HycoError: no such back end.
        ArtifactError: an artifact is missing, damaged or was built with another keep set.
        CompileError: a graph or a binary cannot be opened.
    """
    chosen = find_backend(backend)
    spec, _ = _read_part(run, SLM, SLM_SPEC_FILE, SlmSpec)
    tables = HostTables(run / SLM / TABLES_FILE)
    tree, prefill = chosen.slm(run, target)
    sink = {} if spec.opening_token is None else read_attention_sink(run / SLM / SLM_SINK_FILE)
    return GraphSlm(spec, tables, tree, prefill, sink)


def find_backend(name: str) -> Backend:
    """The back end called `name`.

    Raises:
        HycoError: no such back end; the hint lists the known ones.
    """
    if name not in BACKENDS:
        known = ", ".join(f"{backend.name} ({backend.summary})" for backend in BACKENDS.values())
        raise HycoError(f"unknown device back end {name!r}", f"known ones: {known}")
    return BACKENDS[name]


def _read_part(run: Path, stage: str, spec_file: str, kind: type[Spec]) -> tuple[Spec, KeepSet]:
    """The spec of a converted graph, and the keep set that its rows count."""
    spec, keepset = read_spec(run / stage / spec_file, kind), read_keepset(run / KEEPSET)
    require_keepset(stage, spec.keepset_digest, keepset)
    return spec, keepset


def _torch_head(run: Path, target: str) -> GraphSession:
    from hyco_export.models.head.static_pass import open_torch_head

    return open_torch_head(run)


def _torch_slm(run: Path, target: str) -> SlmSessions:
    from hyco_export.models.slm.static_pass import open_torch_slm

    sessions = open_torch_slm(run / SLM)
    return sessions.tree, sessions.prefill


def _cpu_head(run: Path, target: str) -> GraphSession:
    from hyco_export.graph.parity import ReferenceSession

    return ReferenceSession(run / HEAD / f"{HEAD_GRAPH}.onnx")


def _cpu_slm(run: Path, target: str) -> SlmSessions:
    from hyco_export.graph.parity import ReferenceSession

    folder = run / SLM
    return (
        ReferenceSession(folder / f"{SLM_TREE_GRAPH}.onnx"),
        ReferenceSession(folder / f"{SLM_PREFILL_GRAPH}.onnx"),
    )


def _qnn_session(run: Path, target: str, graph: str) -> GraphSession:
    from hyco_export.graph.qnn import open_context

    chosen = find_target(target)
    return open_context(run / artifact_name(COMPILE, chosen.name) / f"{graph}_ctx.onnx", chosen)


def _qnn_head(run: Path, target: str) -> GraphSession:
    return _qnn_session(run, target, HEAD_GRAPH)


def _qnn_slm(run: Path, target: str) -> SlmSessions:
    tree = _qnn_session(run, target, SLM_TREE_GRAPH)
    try:
        return tree, _qnn_session(run, target, SLM_PREFILL_GRAPH)
    except BaseException:
        tree.close()
        raise


BACKENDS: dict[str, Backend] = {
    backend.name: backend
    for backend in (
        Backend("torch", "the float networks", _torch_head, _torch_slm),
        Backend("onnx-cpu", "the QDQ graphs on the CPU", _cpu_head, _cpu_slm),
        Backend("qnn", "the context binaries on the NPU, or its emulator on x86", _qnn_head, _qnn_slm),
    )
}
