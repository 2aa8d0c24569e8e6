"""AI Hub as this program uses it: the calls of its client, and its failures as errors with a next step.

The protocols are the part of `qai_hub.Client` that is called here; tests put a fake behind them. The real client is
imported when it is opened. What it says may hold a token or a signed address, so errors never quote it whole.
"""

import configparser
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np

from hyco_export.errors import HycoError
from hyco_export.graph.qnn_errors import find_known

CONFIG_VARIABLE, CONFIG_FILE = "QAIHUB_CLIENT_INI", Path(".qai_hub") / "client.ini"
LOGIN_HINT = "get a token at https://workbench.aihub.qualcomm.com (Account), then: qai-hub configure --api_token TOKEN"
NETWORK_HINT = "AI Hub works over the network only: try again with one, or compile and emulate on this machine"
SHOWN_CHARS = 300
SECRETS = re.compile(
    r"(?i)(token|authorization|signature|credential|api[_-]?key)[\"']?\s*[=:]\s*\S+|https?://\S+|[0-9a-z]{32,}"
)
Entries = Mapping[str, Sequence[np.ndarray]]


class HubError(HycoError):
    """AI Hub refuses a call, cannot be reached, or a job there failed."""


class Status(Protocol):
    """`qai_hub.client.JobStatus`. code: CREATED, PROVISIONING_DEVICE, ..., SUCCESS or FAILED."""

    @property
    def code(self) -> str: ...

    message: str | None


class Job(Protocol):
    """`qai_hub.client.CompileJob` and `InferenceJob`."""

    job_id: str

    @property
    def url(self) -> str: ...

    def get_status(self) -> Status: ...


class InferenceJob(Job, Protocol):
    """A run on a phone."""

    def download_output_data(self) -> Any: ...

    def download_profile(self) -> Any: ...


class CompileJob(Job, Protocol):
    """A compilation on the vendor's machines."""

    def download_target_model(self, filename: str) -> str | None: ...


class Device(Protocol):
    """`qai_hub.Device`."""

    name: str
    os: str
    attributes: Any


class HubClient(Protocol):
    """`qai_hub.Client`."""

    def get_devices(self, name: str = "", os: str = "", attributes: Any = ()) -> Sequence[Any]: ...

    def submit_inference_job(
        self, model: Any, device: Any, inputs: Any = None, name: Any = None, options: str = "", retry: bool = True,
        profile: bool = True,
    ) -> Any: ...  # fmt: skip

    def submit_compile_job(
        self, model: Any, device: Any, name: Any = None, *, options: str = "", retry: bool = True
    ) -> Any: ...


class Login(msgspec.Struct, frozen=True):
    """Whether a token is set up, not the token."""

    configured: bool
    found: str
    next: str = LOGIN_HINT


def aihub_login() -> Login:
    """Looks at the client's configuration file without importing the client."""
    path = Path(os.environ.get(CONFIG_VARIABLE) or Path.home() / CONFIG_FILE).expanduser()
    if not path.is_file():
        return Login(False, "not set up")
    parser = configparser.ConfigParser(interpolation=None)
    try:
        parser.read(path, encoding="utf-8")
    except (configparser.Error, UnicodeDecodeError, OSError):
        return Login(False, f"{path} cannot be read")
    if not parser.get("api", "api_token", fallback="").strip():
        return Login(False, f"{path} has no token")
    return Login(True, "a token is set up")


def open_client() -> HubClient:
    """The real client.

    Raises:
        HubError: no token is set up.
    """
    login = aihub_login()
    if not login.configured:
        raise HubError(f"no AI Hub login: {login.found}", login.next)
    import qai_hub

    with hub_errors("opening AI Hub"):
        client = qai_hub.Client()
        client.set_verbose(False)
        return client


@contextmanager
def hub_errors(action: str) -> Iterator[None]:
    """Turn what the client raises into a HubError about `action`: one line, and the next step.

    Raises:
        HubError: the client refused, or the service cannot be reached.
    """
    try:
        yield
    except (HycoError, KeyboardInterrupt):
        raise
    except Exception as error:
        raise _as_hub_error(error, action) from None  # the chain would show what the client says, and may hold secrets


def _as_hub_error(error: Exception, action: str) -> HubError:
    kind, said = type(error).__name__, str(error)
    if kind == "RateLimitedError" or re.search(r"(?i)quota|too many|limit exceeded", said):
        return HubError(
            f"{action}: AI Hub takes no more jobs from this account for now",
            "wait until jobs that run have ended (AI Hub's Jobs page lists them), then run the command again",
        )
    if re.search(r"(?i)authenticate|api token|configuration file", said):
        return HubError(f"{action}: AI Hub does not accept the login of this machine", LOGIN_HINT)
    if isinstance(error, OSError | TimeoutError) or re.search(
        r"(?i)could not connect|timeout occurred|unavailable right now|communication error|reported errors", said
    ):
        return HubError(f"{action}: AI Hub cannot be reached or has a fault", NETWORK_HINT)
    if re.search(r"(?i)is not available", said):
        return HubError(
            f"{action}: the device is offline or no longer offered",
            "try again later, or take another of the same chip: hyco-export profile --list-devices",
        )
    return HubError(f"{action}: AI Hub refuses ({harmless(said)})", "correct what it names, then run the command again")


def harmless(text: str) -> str:
    """A service's words in one short line, without what may be a secret: tokens, addresses, long identifiers."""
    words = " ".join(SECRETS.sub("...", text).split())
    return words if len(words) <= SHOWN_CHARS else f"{words[:SHOWN_CHARS]} ..."


def job_failure(message: str | None, subject: str, job_id: str) -> HubError:
    """The error for a job that ended as FAILED; the vendor's table explains what it knows."""
    known = find_known(message or "")
    if known is not None:
        return HubError(f"{known.message.format(subject=subject)} (AI Hub job {job_id})", known.hint)
    said = harmless(message or "without a word")
    return HubError(f"AI Hub job {job_id} of {subject} failed: {said}", f"see its log on the page of job {job_id}")
