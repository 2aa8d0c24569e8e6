"""A compiled graph on a phone of AI Hub: what it computes beside the integer graph, and what the NPU takes.

The service's profile is a mapping (`qai_hub.InferenceJob.download_profile`): times in microseconds, memory in bytes,
operators with the unit that ran each.
"""

import statistics
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from hyco_export.cloud.client import Device, HubClient, HubError, hub_errors
from hyco_export.cloud.jobs import OnState, downloaded_outputs, stage_pair, submit_inference, wait_for
from hyco_export.core.device_profile import GraphProfile, OutputAgreement
from hyco_export.core.device_spec import GraphSpec
from hyco_export.graph.parity import ParityLimits, ReferenceSession, compare_sessions

US_PER_MS = 1000.0
NPU = "NPU"
Feeds = Sequence[Mapping[str, np.ndarray]]


class RecordedSession:
    """A `GraphSession` that gives out what a device computed, in the order of its feeds."""

    def __init__(self, outputs: Sequence[Mapping[str, np.ndarray]], spec: GraphSpec) -> None:
        self._outputs, self._spec = iter(outputs), spec

    def run(self, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The next outputs. Raises HubError: one has another type or shape than the graph's."""
        found = next(self._outputs)
        for tensor in self._spec.outputs:
            values = found[tensor.name]
            if values.size != int(np.prod(tensor.shape)) or values.dtype != np.dtype(tensor.dtype):
                raise HubError(
                    f"output {tensor.name} of {self._spec.name} came back as {values.dtype} {list(values.shape)}, "
                    f"not {tensor.dtype} {list(tensor.shape)}",
                    "see which model the job ran; compile again and profile again",
                )
        return {tensor.name: found[tensor.name].reshape(tensor.shape) for tensor in self._spec.outputs}

    def close(self) -> None:
        """Nothing is open."""


def profile_graph(
    client: HubClient,
    device: Device,
    context_model: Path,
    model: Path,
    spec: GraphSpec,
    feeds: Feeds,
    limits: ParityLimits,
    on_state: OnState,
    keep: Path | None = None,
) -> GraphProfile:
    """Run the pair of `context_model` on the device over `feeds`.

    Args:
        model: the integer graph that it was compiled from; the reference on the CPU.
        keep: a folder for the outputs, one npz a feed.

    Raises:
        HubError: the job failed, or what came back is not the graph's.
    """
    with tempfile.TemporaryDirectory() as name:
        job = start_graph(client, device, stage_pair(context_model, Path(name) / spec.name), spec, feeds)
    outputs, profile = finish_graph(job, spec, len(feeds), on_state)
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        for number, arrays in enumerate(outputs):
            named: dict[str, Any] = dict(arrays)  # numpy's signature takes any of them for its own options
            np.savez(keep / f"{number}.npz", **named)
    report = compare_sessions(ReferenceSession(model), RecordedSession(outputs, spec), spec, feeds, limits)
    agreement = tuple(
        OutputAgreement(one.name, one.equal_share, one.outside_share, one.passed) for one in report.outputs
    )
    return msgspec.structs.replace(profile, outputs=agreement)


def start_graph(client: HubClient, device: Device, pair: Path, spec: GraphSpec, feeds: Feeds) -> Any:
    """The job that runs the compiled pair in the folder `pair` over `feeds` on the device.

    Raises:
        HubError: the service refuses it.
    """
    ordered = {tensor.name: [feed[tensor.name] for feed in feeds] for tensor in spec.inputs}
    return submit_inference(client, pair, device, ordered, f"hyco {spec.name}")


def finish_graph(
    job: Any, spec: GraphSpec, count: int, on_state: OnState
) -> tuple[list[dict[str, np.ndarray]], GraphProfile]:
    """Wait for a job over `count` feeds: what the device gave for each, and what it took; nothing is compared yet.

    Raises:
        HubError: it failed, or left no outputs or no times.
    """
    wait_for(job, spec.name, on_state)
    outputs = downloaded_outputs(job, [tensor.name for tensor in spec.outputs], count, spec.name)
    with hub_errors(f"fetching times of {spec.name}"):
        measured = job.download_profile()
    return outputs, read_times(measured, job.job_id, spec.name)


def read_times(measured: Mapping[str, Any], job_id: str, subject: str) -> GraphProfile:
    """The figures of the service's profile, without outputs.

    Raises:
        HubError: it has no time.
    """
    summary = measured.get("execution_summary") or {}
    times = [float(time) for time in summary.get("all_inference_times") or [] if time]
    estimate = summary.get("estimated_inference_time")
    if not times and not estimate:
        raise HubError(f"job {job_id} measured no time of {subject}", "run the command again")
    operators = measured.get("execution_detail") or []
    peak = summary.get("inference_memory_peak_range") or ()
    memory = max(peak) if isinstance(peak, Sequence) and peak else summary.get("estimated_inference_peak_memory")
    load = summary.get("warm_load_time") or summary.get("first_load_time")
    on_npu = sum(operator.get("compute_unit") == NPU for operator in operators)
    return GraphProfile(
        npu_ms=statistics.median(times or [float(estimate or 0.0)]) / US_PER_MS,
        runs=len(times) or 1,
        peak_memory_bytes=int(memory) if isinstance(memory, int | float) and memory > 0 else None,
        npu_share=on_npu / len(operators) if operators else None,
        operators=len(operators),
        load_ms=float(load) / US_PER_MS if load else None,
        job=job_id,
        outputs=(),
    )
