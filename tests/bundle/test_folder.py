"""Building bundles: whole or not at all, nothing foreign replaced, equal inputs giving equal files."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from hyco_export.bundle import folder
from hyco_export.bundle.folder import build_bundle
from hyco_export.bundle.spec import GRAPHS, open_bundle, read_bundle
from hyco_export.errors import ArtifactError
from hyco_export.evaluate.connect import Subject
from hyco_export.graph.context_binary import read_context

INTERRUPTED_RUN = 5


def silent(label: str, done: int, total: int) -> None:
    pass


def test_every_graph_lies_alone_under_its_own_name(bundle_folder: Path) -> None:
    for name in GRAPHS:
        assert sorted(path.name for path in (bundle_folder / name).iterdir()) == [f"{name}.bin", f"{name}.onnx"]
        (graph,) = read_context(bundle_folder / name / f"{name}.bin").graphs
        assert graph.spec.name == name


def test_a_bundle_of_the_same_artifacts_is_kept(bundle_folder: Path, subject: Subject) -> None:
    before = (bundle_folder / "bundle.json").stat().st_mtime_ns
    build_bundle(subject, bundle_folder, silent)
    assert (bundle_folder / "bundle.json").stat().st_mtime_ns == before
    assert [path.name for path in bundle_folder.parent.iterdir()] == [bundle_folder.name]


def test_a_killed_build_goes_on_to_the_same_bytes(
    bundle_folder: Path, subject: Subject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = 0

    class Killed:
        """A session of the emulator that is interrupted at its fifth run."""

        def __init__(self, model: Path, target: str) -> None:
            self._session = open_emulator(model, target)

        def run(self, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
            nonlocal runs
            runs += 1
            if runs == INTERRUPTED_RUN:
                self._session.close()
                raise KeyboardInterrupt
            return self._session.run(feeds)

        def close(self) -> None:
            self._session.close()

    open_emulator = folder._emulated
    monkeypatch.setattr(folder, "_emulated", Killed)
    out = tmp_path / "bundle"
    with pytest.raises(KeyboardInterrupt):
        build_bundle(subject, out, silent)
    assert not out.exists()
    build_bundle(subject, out, silent)
    bundle = read_bundle(out)
    assert bundle == read_bundle(bundle_folder)
    assert runs == len(bundle.cases) + 1, "what the first try had run was run again"
    build_bundle(subject, out, silent)
    assert runs == len(bundle.cases) + 1, "a whole bundle is kept"
    (out / "BUNDLE.md").write_text("altered")
    (out / "outputs.txt").write_text("mine")
    with pytest.raises(ArtifactError, match=r"outputs\.txt is no file of the bundle"):
        build_bundle(subject, out, silent)
    (out / "outputs.txt").unlink()
    build_bundle(subject, out, silent)
    assert open_bundle(out) == bundle, "a damaged one is built again"
    assert [path.name for path in tmp_path.iterdir()] == ["bundle"]


def test_foreign_folders_stay_as_they_are(subject: Subject, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ArtifactError, match="is a folder with other contents"):
        build_bundle(subject, tmp_path, silent)
    with pytest.raises(ArtifactError, match="is a file"):
        build_bundle(subject, tmp_path / "notes.txt", silent)
    (tmp_path / "bundle.json").write_text("{}")
    with pytest.raises(ArtifactError, match="is not a bundle of format 1"):
        build_bundle(subject, tmp_path, silent)
    assert (tmp_path / "notes.txt").read_text() == "mine"
