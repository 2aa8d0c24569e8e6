"""Where artifacts are while they are built: `.build/<artifact>-<identity>` inside the run folder.

The identity is of the artifact's key and the libraries' versions: what another recipe, code or torch began is never
continued. Knows folders; not stages.
"""

import shutil
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from hyco_export.core.artifact import content_digest

BUILD_FOLDER = ".build"
IDENTITY_DIGITS = 16


def build_folder(root: Path, artifact: str, key: str, versions: Mapping[str, str]) -> Path:
    """The build folder of an artifact with this key, made with these libraries."""
    identity = content_digest([key, versions])
    return root / BUILD_FOLDER / f"{artifact}-{identity[:IDENTITY_DIGITS]}"


def sweep(root: Path, artifacts: Iterable[str], keep: Collection[Path] = ()) -> None:
    """Remove what earlier runs left of these artifacts, but the build folders to keep."""
    builds = root / BUILD_FOLDER
    if not builds.is_dir():
        return
    names = set(artifacts)
    for path in builds.iterdir():
        artifact, _, _ = path.name.rpartition("-")
        if path not in keep and names & {artifact, path.name}:
            shutil.rmtree(path)
    if not any(builds.iterdir()):
        builds.rmdir()
