"""Compiled graphs that `compile` takes over from the artifact that lies in its place: those it would make again.

What a graph was made from and compared by stands as two digests in the manifest's metrics. Equal digests mean equal
bytes: the files are linked, or copied where a file system has no links, and each is held against its sha256.
"""

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import msgspec
import onnx

from hyco_export.core.artifact import Manifest, content_digest, read_manifest, verify_file
from hyco_export.core.targets import Target
from hyco_export.errors import ArtifactError
from hyco_export.graph.parity import ParityReport
from hyco_export.graph.qnn_process import ContextInfo, TwoBit
from hyco_export.stages.declarations import library_versions

CONTEXTS_FILE, PARITY_FILE = "contexts.json", "parity.json"
MADE_FROM, COMPARED_BY = "made_from", "compared_by"  # in a graph's metrics
COMPILING = ("onnxruntime", "onnxruntime-qnn")  # libraries that a binary's bytes depend on
COMPARING = (*COMPILING, "onnx", "numpy", "torch")  # and those that a comparison's figures do
Digest = Callable[[Path], str]


def made_from(model: Path, target: Target, two_bit: TwoBit | None, digest: Digest) -> str:
    """The digest of all that a binary depends on: the graph with its name and weights, target, compiler, 2-bit weights.

    Args:
        model: the QDQ graph; external data beside it.
        digest: sha256 of a file.
    """
    graph = onnx.load(model, load_external_data=False).graph
    places = {entry.value for tensor in graph.initializer for entry in tensor.external_data if entry.key == "location"}
    files = {name: digest(model.parent / name) for name in (model.name, *sorted(places))}
    narrow = None if two_bit is None else [Path(two_bit.library).parent.name, *two_bit.names]  # named by its contents
    return content_digest([files, msgspec.to_builtins(target), library_versions(COMPILING), narrow])


def compared_by(made: str, files: Sequence[Path], settings: Any, digest: Digest) -> str:
    """The digest of all that a comparison depends on: the binary, feeds and float weights, limits and their number."""
    return content_digest([made, [digest(path) for path in files], settings, library_versions(COMPARING)])


class EarlierGraphs:
    """The graphs of an artifact that `compile` made before; of none where there is no such artifact."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder or Path()
        self._manifest: Manifest | None = read_manifest(folder) if folder else None
        metrics = self._manifest.metrics if self._manifest else {}
        self._metrics: Mapping[str, Mapping[str, Any]] = {**metrics.get("graphs", {})}
        self._shared: Mapping[str, Any] = metrics.get("slm_shared", {})

    def metrics(self, name: str, made: str) -> Mapping[str, Any] | None:
        """What was measured of the graph `name`, if it was made from the same."""
        found = self._metrics.get(name, {})
        return found if found.get(MADE_FROM) == made else None

    def shared_metrics(self, made: str) -> Mapping[str, Any] | None:
        """The same of the binary that both SLM graphs share."""
        return self._shared if self._shared.get(MADE_FROM) == made else None

    def take(self, patterns: Sequence[str], out_dir: Path) -> bool:
        """Bring the files with these names into `out_dir`; False, and nothing is there, where one is damaged."""
        if self._manifest is None:
            return False
        names = [name for name in self._manifest.files if any(fnmatchcase(name, pattern) for pattern in patterns)]
        try:
            for name in names:
                _link(self._folder / name, out_dir / name)
                verify_file(out_dir, name, self._manifest)
        except (OSError, ArtifactError):
            for name in names:
                (out_dir / name).unlink(missing_ok=True)
            return False
        return bool(names)

    def info(self, name: str) -> ContextInfo | None:
        """What the binary said of itself."""
        return self._read(CONTEXTS_FILE, dict[str, ContextInfo]).get(name)

    def report(self, name: str, compared: str) -> ParityReport | None:
        """How the binary agreed with its graph, if it was compared by the same."""
        if self._metrics.get(name, {}).get(COMPARED_BY) != compared:
            return None
        return self._read(PARITY_FILE, dict[str, ParityReport]).get(name)

    def _read(self, name: str, kind: type[dict[str, Any]]) -> dict[str, Any]:
        """A table of the artifact; empty where it is damaged."""
        if self._manifest is None:
            return {}
        try:
            verify_file(self._folder, name, self._manifest)
            found: dict[str, Any] = msgspec.json.decode((self._folder / name).read_bytes(), type=kind)
        except (ArtifactError, OSError, msgspec.MsgspecError):
            return {}
        return found


def _link(source: Path, target: Path) -> None:
    """A second name of the same file, or a copy."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
