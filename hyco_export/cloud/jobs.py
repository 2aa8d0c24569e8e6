"""Jobs of AI Hub: the device they run on, submitting, waiting, and what comes back."""

import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx.external_data_helper import uses_external_data

from hyco_export.cloud.client import Device, Entries, HubClient, HubError, Job, hub_errors, job_failure
from hyco_export.core.targets import Target

DEFAULT_DEVICE = "Samsung Galaxy S26 Ultra"
SUCCEEDED, FAILED = "SUCCESS", "FAILED"
POLL_S = 5.0
LONGEST_S = 6 * 3600.0  # a queue for a new phone may take hours; the service ends jobs itself
SOC_ATTRIBUTE, FRAMEWORK_ATTRIBUTE = "soc-model:", "framework:"
CONTEXT_SUFFIX, DATA_NAME = "_ctx", "model.data"
OnState = Callable[[str, str], None]  # subject, state


def find_device(client: HubClient, name: str, target: Target, framework: str = "onnx") -> Device:
    """The service's device called `name`, newest system first, checked against the target.

    Raises:
        HubError: it is not offered, is of another chip, or cannot run what is sent.
    """
    with hub_errors(f"asking for {name}"):
        found = list(client.get_devices(name=name))
        everything = [] if found else list(client.get_devices())
    if not found:
        same = sorted(
            {device.name for device in everything if f"{SOC_ATTRIBUTE}{target.soc_model}" in device.attributes}
        )
        others = f"of the same chip: {', '.join(same)}" if same else "see: hyco-export profile --list-devices"
        raise HubError(f"AI Hub does not offer {name!r}, or it is offline", f"take another with --device; {others}")
    device: Device = found[-1]
    models = {text.removeprefix(SOC_ATTRIBUTE) for text in device.attributes if text.startswith(SOC_ATTRIBUTE)}
    if models and str(target.soc_model) not in models:
        raise HubError(
            f"{name} has SoC model {', '.join(sorted(models))}, {target.name} is model {target.soc_model}",
            "give the --device that has the target's chip, or the --target of the device",
        )
    if f"{FRAMEWORK_ATTRIBUTE}{framework}" not in device.attributes:
        raise HubError(f"{name} does not run {framework} models", "take another with --device")
    return device


def stage_pair(context_model: Path, folder: Path) -> Path:
    """A folder with one compiled graph alone, as the service takes it: the .onnx and the .bin it names."""
    attributes = {a.name: a for a in onnx.load(context_model, load_external_data=False).graph.node[0].attribute}
    folder.mkdir(parents=True)
    for name in (context_model.name, attributes["ep_cache_context"].s.decode()):
        shutil.copyfile(context_model.with_name(name), folder / name)
    return folder


def stage_graph(model: Path, folder: Path) -> Path:
    """A folder with one integer graph and its weights, which the service wants in a single file `*.data`."""
    folder.mkdir(parents=True)
    graph = onnx.load(model, load_external_data=False)
    sources = set()
    for tensor in graph.graph.initializer:
        if uses_external_data(tensor):
            for entry in tensor.external_data:
                if entry.key == "location":
                    sources.add(entry.value)
                    entry.value = DATA_NAME
    onnx.save(graph, folder / model.name)
    for source in sources:  # one file for all graphs of a stage
        shutil.copyfile(model.with_name(source), folder / DATA_NAME)
    return folder


def submit_inference(client: HubClient, folder: Path, device: Device, feeds: Entries, name: str) -> Any:
    """A job that runs the pair in `folder` on the device over `feeds`, with times."""
    inputs = {key: list(arrays) for key, arrays in feeds.items()}
    with hub_errors(f"submitting {name}"):
        return client.submit_inference_job(str(folder), device, inputs, name=name, retry=False, profile=True)


def submit_compile(client: HubClient, folder: Path, device: Device, options: str, name: str) -> Any:
    """A job that compiles the integer graph in `folder` for the device."""
    with hub_errors(f"submitting {name}"):
        return client.submit_compile_job(str(folder), device, name=name, options=options, retry=False)


def wait_for(job: Job, subject: str, on_state: OnState, pause: Callable[[float], None] = time.sleep) -> None:
    """Until the job has succeeded; states are reported as they change.

    Raises:
        HubError: it failed, cannot be asked for, or takes longer than any job may.
    """
    waited, shown = 0.0, ""
    while True:
        with hub_errors(f"waiting for {subject} (job {job.job_id})"):
            status = job.get_status()
        if status.code != shown:
            shown = status.code
            on_state(subject, shown)
        if shown == SUCCEEDED:
            return
        if shown == FAILED:
            raise job_failure(status.message, subject, job.job_id)
        if waited >= LONGEST_S:
            raise HubError(
                f"job {job.job_id} of {subject} has not ended after {LONGEST_S / 3600:.0f} hours", "see its page"
            )
        pause(POLL_S)
        waited += POLL_S


def downloaded_outputs(job: Any, names: Sequence[str], count: int, subject: str) -> list[dict[str, np.ndarray]]:
    """Outputs by name, one mapping a feed.

    Raises:
        HubError: some are missing.
    """
    with hub_errors(f"fetching outputs of {subject}"):
        entries = job.download_output_data()
    entries = entries or {}
    absent = [name for name in names if len(entries.get(name, ())) != count]
    if absent:
        given = len(entries.get(absent[0], ()))
        raise HubError(
            f"job {job.job_id} gave {given} of {count} values of output {absent[0]} of {subject}",
            "run the command again; if it stays, see the job's log",
        )
    return [{name: np.asarray(entries[name][number]) for name in names} for number in range(count)]
