"""Times of a run's graphs on a real device (`profile.json`), as `profile` measured them.

profile = read_profile(run_folder, "sm8850")          # None: nothing was measured of these graphs
profile = read_profile_file(Path("profile.json"))     # of any place, such as beside a bundle
head_ms, slm_ms = profile.pass_ms("head"), profile.pass_ms("slm_tree")
"""

from pathlib import Path

import msgspec

from hyco_export.core.artifact import COMPILE, Manifest, artifact_name, content_digest, read_manifest
from hyco_export.core.files import write_json
from hyco_export.errors import ArtifactError

PROFILE_FILE = "profile.json"
MEASURE = "measure again: hyco-export profile"


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

    def pass_ms(self, graph: str) -> float:
        """NPU milliseconds of one run of a graph. Raises ArtifactError: it was not measured."""
        if graph not in self.graphs:
            raise ArtifactError(f"the profile of {self.device} has no times of {graph}", MEASURE)
        return self.graphs[graph].npu_ms


def write_profile(folder: Path, profile: DeviceProfile) -> Path:
    """Store it in a run folder, or beside the outputs of a bundle."""
    write_json(folder / PROFILE_FILE, profile)
    return folder / PROFILE_FILE


def graphs_key(compiled: Manifest) -> str:
    """Of the integer graphs that a compiled artifact was made from, whichever compiler made it."""
    return content_digest(compiled.inputs)


def read_profile(run: Path, target: str) -> DeviceProfile | None:
    """The profile of the run's graphs for `target`; None where there is none, or one of older graphs.

    Raises:
        ArtifactError: the file is damaged.
    """
    if not (run / PROFILE_FILE).is_file():
        return None
    profile = read_profile_file(run / PROFILE_FILE)
    compiled = read_manifest(run / artifact_name(COMPILE, target))
    return profile if (profile.target, profile.graphs_key) == (target, graphs_key(compiled)) else None


def read_profile_file(path: Path) -> DeviceProfile:
    """A `profile.json` wherever it lies, of whatever graphs.

    Raises:
        ArtifactError: no such file, or a damaged one.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=DeviceProfile)
    except OSError as error:
        raise ArtifactError(f"{path} is no file that can be read", "give what profile wrote") from error
    except msgspec.MsgspecError as error:
        raise ArtifactError(f"{path} cannot be read: {error}", MEASURE) from error
