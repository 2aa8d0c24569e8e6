"""AI Hub without a network: a client whose jobs go through the service's states, fail as they do there, and leave what
they leave. Every call is recorded as it was made, so that tests can hold it against the real client's signatures.

What raises are the real client's own exception types, with texts as the service words them.
"""

import shutil
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from qai_hub.client import Device, JobStatus, RateLimitedError, UserError

from hyco_export.core.targets import TARGETS
from hyco_export.graph.qnn import compile_context

States = JobStatus.State
COMPILE_STATES = (States.CREATED, States.OPTIMIZING_MODEL, States.SUCCESS)
INFERENCE_STATES = (
    States.CREATED,
    States.PROVISIONING_DEVICE,
    States.MEASURING_PERFORMANCE,
    States.RUNNING_INFERENCE,
    States.SUCCESS,
)
TOKEN = "s3cr3t0token0of0this0account0000000000"
Computed = Callable[[Path, Mapping[str, Sequence[np.ndarray]]], Mapping[str, list[np.ndarray]]]
"""Folder of a pair, inputs by name -> outputs by name."""
PROFILE = {
    "execution_summary": {
        "estimated_inference_time": 1400,
        "all_inference_times": [1900, 1500, 1400],
        "estimated_inference_peak_memory": 90_000_000,
        "inference_memory_peak_range": (80_000_000, 91_000_000),
        "first_load_time": 320_000,
        "warm_load_time": 150_000,
    },
    "execution_detail": [
        {"name": "a", "type": "MatMul", "compute_unit": "NPU", "execution_time": 900},
        {"name": "b", "type": "Softmax", "compute_unit": "NPU", "execution_time": 400},
        {"name": "c", "type": "Cast", "compute_unit": "CPU", "execution_time": 100},
    ],
}


@dataclass
class FakeJob:
    """A job. Each question after its state moves it on by one."""

    job_id: str
    states: Sequence[JobStatus.State]
    message: str | None = None
    outputs: Any = None
    profile: Any = None
    model: Path | None = None
    asked: int = 0

    @property
    def url(self) -> str:
        return f"https://workbench.aihub.qualcomm.com/jobs/{self.job_id}/"

    def get_status(self) -> JobStatus:
        state = self.states[min(self.asked, len(self.states) - 1)]
        self.asked += 1
        return JobStatus(state, self.message if state is States.FAILED else None)

    def download_output_data(self) -> Any:
        return self.outputs

    def download_profile(self) -> Any:
        return self.profile

    def download_target_model(self, filename: str) -> str | None:
        if self.model is None:
            return None
        shutil.copyfile(self.model, filename)
        return filename


def phone(name: str, soc_model: int, system: str = "16", frameworks: Sequence[str] = ("onnx", "qnn")) -> Device:
    attributes = ["format:phone", "os:android", f"soc-model:{soc_model}", *(f"framework:{name}" for name in frameworks)]
    return Device(name, system, attributes)


PHONES = (
    phone("Samsung Galaxy S26 Ultra", 87),
    phone("Snapdragon 8 Elite Gen 5 QRD", 87),
    phone("Samsung Galaxy S25", 69),
    phone("Google Pixel 10", 0, frameworks=("tflite",)),
)


@dataclass
class FakeHub:
    """The client. `compute` stands for the phone; `fails` is the message of jobs that fail; `raises`, by method, is
    raised by it."""

    compute: Computed | None = None
    phones: Sequence[Device] = PHONES
    fails: str | None = None
    raises: dict[str, Exception] = field(default_factory=dict)
    folder: Path = Path()
    target: str = "sm8850"
    profile: Any = field(default_factory=lambda: PROFILE)
    calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = field(default_factory=list)

    def get_devices(self, *args: Any, **named: Any) -> list[Device]:
        self._called("get_devices", args, named)
        return [one for one in self.phones if named.get("name", "") in ("", one.name)]

    def submit_inference_job(self, model: str, device: Device, inputs: Any, **named: Any) -> FakeJob:
        self._called("submit_inference_job", (model, device, inputs), named)
        _require_pair(Path(model))
        if device not in self.phones:
            raise UserError(f"{device} is not available.")
        if self.fails is not None:
            return FakeJob("jfailed01", (*INFERENCE_STATES[:2], States.FAILED), self.fails)
        outputs = self.compute(Path(model), inputs) if self.compute else None
        return FakeJob(f"jp{len(self.calls):07}", INFERENCE_STATES, outputs=outputs, profile=self.profile)

    def submit_compile_job(self, model: str, device: Device, **named: Any) -> FakeJob:
        self._called("submit_compile_job", (model, device), named)
        graph = _require_graph(Path(model))
        if self.fails is not None:
            return FakeJob("jfailed02", (*COMPILE_STATES[:2], States.FAILED), self.fails)
        archive = self.folder / f"{graph.stem}.zip"
        place = self.folder / graph.stem
        place.mkdir()
        made = compile_context(graph, place, "model", TARGETS[self.target], self.folder / "log")
        with zipfile.ZipFile(archive, "w") as file:
            for path in (made.context_model, made.binary):
                file.write(path, f"{graph.stem}.onnx/{path.name}")
        return FakeJob(f"jc{len(self.calls):07}", COMPILE_STATES, model=archive)

    def _called(self, method: str, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        self.calls.append((method, args, named))
        if method in self.raises:
            raise self.raises[method]


def _require_pair(folder: Path) -> None:
    """As the client does it: exactly one .onnx and its .bin."""
    suffixes = sorted(path.suffix for path in folder.iterdir())
    if suffixes != [".bin", ".onnx"]:
        raise UserError(f"Model directory '{folder}' must contain exactly one .onnx file.")


def _require_graph(folder: Path) -> Path:
    files = list(folder.iterdir())
    graphs = [path for path in files if path.suffix == ".onnx"]
    if len(graphs) != 1 or any(path.suffix not in (".onnx", ".data") for path in files):
        raise UserError(f"Model directory '{folder}' can only contain .onnx, .data, .encodings, and .bin files.")
    return graphs[0]


def no_token() -> UserError:
    return UserError(f"Failed to load configuration file.\nYour API token is missing. token: {TOKEN}")


def refused_token() -> UserError:
    return UserError(f"Failed to authenticate.\nFailure to authenticate is likely caused by a bad API token {TOKEN}")


def quota() -> RateLimitedError:
    return RateLimitedError("Too many jobs are running in this account")
