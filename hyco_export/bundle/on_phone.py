"""A bundle's graphs on a phone of AI Hub over all golden inputs: outputs as `compare` reads them, and `profile.json`.

All jobs are submitted first: phones are waited for once. The folder of the outputs appears whole or not at all.
"""

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from hyco_export.bundle.compare import FAILED, Comparison, TensorVerdict, compare
from hyco_export.bundle.spec import Bundle, load_arrays, open_bundle
from hyco_export.cloud.client import HubClient
from hyco_export.cloud.jobs import OnState, find_device
from hyco_export.cloud.profile import finish_graph, start_graph
from hyco_export.core.device_profile import PROFILE_FILE, DeviceProfile, GraphProfile, OutputAgreement, write_profile
from hyco_export.core.files import storage_errors
from hyco_export.errors import ArtifactError

SERVICE = "AI Hub"


class PhoneRun(NamedTuple):
    """What was measured, and how the outputs stand to the golden ones."""

    profile: DeviceProfile
    comparison: Comparison


def run_on_phone(client: HubClient, folder: Path, device_name: str, out: Path, on_state: OnState) -> PhoneRun:
    """Run the bundle in `folder` and write `out`/GRAPH/CASE.npz and `out`/profile.json.

    Raises:
        ArtifactError: the bundle is damaged, or `out` holds something else than an earlier run.
        HubError: the device is not there or of another chip, or a job failed.
    """
    _require_ours(out)
    bundle = open_bundle(folder)
    device = find_device(client, device_name, bundle.target)
    cases = {graph: [case for case in bundle.cases if case.graph == graph] for graph in bundle.graphs}
    jobs = {}
    for graph, own in cases.items():
        inputs = bundle.graph_spec(graph).inputs
        feeds = [load_arrays(folder, case.inputs, inputs) for case in own]
        jobs[graph] = start_graph(client, device, folder / graph, bundle.graph_spec(graph), feeds)
    outputs: dict[str, dict[str, Mapping[str, np.ndarray]]] = {}
    measured: dict[str, GraphProfile] = {}
    for graph, own in cases.items():
        found, measured[graph] = finish_graph(jobs[graph], bundle.graph_spec(graph), len(own), on_state)
        outputs[graph] = {case.id: arrays for case, arrays in zip(own, found, strict=True)}
    with storage_errors(out):
        building = _write(outputs, out)
        comparison = compare(folder, building)
        judged = {name: _judged(bundle, name, graph, comparison.tensors) for name, graph in measured.items()}
        profile = DeviceProfile(device.name, device.os, bundle.target.name, bundle.graphs_key, SERVICE, judged)
        write_profile(building, profile)
        if out.is_dir():
            shutil.rmtree(out)
        building.rename(out)
    return PhoneRun(profile, comparison)


def _require_ours(out: Path) -> None:
    """Raises ArtifactError: `out` holds what no earlier run wrote."""
    if out.exists() and not (out / PROFILE_FILE).is_file() and (out.is_file() or any(out.iterdir())):
        raise ArtifactError(f"{out} holds something else (no {PROFILE_FILE})", "give --out a new folder")


def _write(outputs: Mapping[str, Mapping[str, Mapping[str, np.ndarray]]], out: Path) -> Path:
    """The outputs in a folder beside `out`."""
    building = out.with_name(f".{out.name}.building")
    shutil.rmtree(building, ignore_errors=True)
    for graph, found in outputs.items():
        (building / graph).mkdir(parents=True)
        for case, arrays in found.items():
            named: dict[str, Any] = dict(arrays)  # numpy's signature takes any of them for its own options
            np.savez(building / graph / f"{case}.npz", **named)
    return building


def _judged(bundle: Bundle, name: str, graph: GraphProfile, verdicts: Sequence[TensorVerdict]) -> GraphProfile:
    """The graph's profile with its outputs over all golden vectors."""
    agreement = []
    for tensor in bundle.graphs[name].outputs:
        own = [one for one in verdicts if (one.graph, one.tensor) == (name, tensor.name)]
        equal = float(np.mean([one.equal_share for one in own]))
        outside = float(np.mean([one.outside_share for one in own]))
        agreement.append(OutputAgreement(tensor.name, equal, outside, not any(one.verdict in FAILED for one in own)))
    return msgspec.structs.replace(graph, outputs=tuple(agreement))
