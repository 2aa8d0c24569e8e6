"""Times of a run's graphs on a real device (`profile.json` in the run folder), as `profile` measured them."""

from pathlib import Path

import msgspec

from hyco_export.core.artifact import COMPILE, Manifest, artifact_name, content_digest, read_manifest
from hyco_export.core.files import write_json
from hyco_export.errors import ArtifactError

PROFILE_FILE = "profile.json"


class OutputAgreement(msgspec.Struct, frozen=True):
    """One output on the device against the integer graph on the CPU, over all feeds."""

    name: str
    equal_share: float  # of elements that are the same integer
    outside_share: float  # of elements that break the limits
    passed: bool


class GraphProfile(msgspec.Struct, frozen=True):
    """One graph on the device. None: the service did not say."""

    npu_ms: float  # median of one run
    runs: int
    peak_memory_bytes: int | None
    npu_share: float | None  # of operators; a compiled graph may count as one
    operators: int
    load_ms: float | None
    job: str
    outputs: tuple[OutputAgreement, ...]


class DeviceProfile(msgspec.Struct, frozen=True):
    """All graphs of a compiled artifact. `graphs_key`: of the integer graphs that it was compiled from (`graphs_key`),
    which says whether the times are of what is there now."""

    device: str
    os: str
    target: str
    graphs_key: str
    service: str
    graphs: dict[str, GraphProfile]


def write_profile(run: Path, profile: DeviceProfile) -> Path:
    """Store it in the run folder."""
    write_json(run / PROFILE_FILE, profile)
    return run / PROFILE_FILE


def graphs_key(compiled: Manifest) -> str:
    """Of the integer graphs that a compiled artifact was made from, whichever compiler made it."""
    return content_digest(compiled.inputs)


def read_profile(run: Path, target: str) -> DeviceProfile | None:
    """The profile of the run's graphs for `target`; None where there is none, or one of older graphs.

    Raises:
        ArtifactError: the file is damaged.
    """
    path = run / PROFILE_FILE
    if not path.is_file():
        return None
    try:
        profile = msgspec.json.decode(path.read_bytes(), type=DeviceProfile)
    except msgspec.DecodeError as error:
        raise ArtifactError(f"{path} cannot be read: {error}", "measure again: hyco-export profile") from error
    compiled = read_manifest(run / artifact_name(COMPILE, target))
    return profile if (profile.target, profile.graphs_key) == (target, graphs_key(compiled)) else None
