"""Artifacts are published whole or not at all and checked file by file; so are the units of an unfinished build."""

import os
import stat
from pathlib import Path

import msgspec
import numpy as np
import pytest
from safetensors.numpy import save_file

from hyco_export.core.artifact import (
    MANIFEST_NAME,
    WORK_FOLDER,
    Manifest,
    PartialBuild,
    artifact_key,
    publish,
    read_manifest,
    verify,
)
from hyco_export.errors import ArtifactError, StrayFileError


class Config(msgspec.Struct, frozen=True):
    width: int = 4


def manifest(key: str = "k") -> Manifest:
    return Manifest("demo", 1, key, Config(), {}, {}, {}, {"size": 3}, {}, 0.1)


def built(tmp_path: Path, content: str = "abc") -> Path:
    build = tmp_path / "build"
    build.mkdir()
    (build / "data.txt").write_text(content)
    return build


def test_published_folder_verifies_and_keeps_its_metrics(tmp_path: Path) -> None:
    publish(built(tmp_path), tmp_path / "demo", manifest())
    found = verify(tmp_path / "demo")
    assert found.metrics == {"size": 3}
    assert found.files["data.txt"].size_bytes == 3
    assert not (tmp_path / "build").exists()


def test_publishing_again_replaces_the_old_artifact(tmp_path: Path) -> None:
    publish(built(tmp_path), tmp_path / "demo", manifest("old"))
    publish(built(tmp_path, "longer"), tmp_path / "demo", manifest("new"))
    assert verify(tmp_path / "demo").key == "new"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["demo"]


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (lambda folder: (folder / "data.txt").write_text("abd"), "is not the file that was built"),
        (lambda folder: (folder / "data.txt").write_text("ab"), "is not the file that was built"),
        (lambda folder: (folder / "data.txt").unlink(), "is missing"),
        (lambda folder: (folder / MANIFEST_NAME).unlink(), "holds no artifact"),
        (lambda folder: (folder / MANIFEST_NAME).write_text("{"), "cannot be read"),
    ],
)
def test_every_damage_is_named(tmp_path: Path, damage, text: str) -> None:
    publish(built(tmp_path), tmp_path / "demo", manifest())
    damage(tmp_path / "demo")
    with pytest.raises(ArtifactError, match=text) as caught:
        verify(tmp_path / "demo")
    assert caught.value.hint == "build it again: hyco-export demo"


def test_an_artifact_that_is_not_there_is_built_not_built_again(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError) as caught:
        verify(tmp_path / "demo@one")
    assert caught.value.hint == "build it: hyco-export demo"
    for target in ("two", "three"):
        publish(built(tmp_path), tmp_path / f"demo@{target}", manifest())
    with pytest.raises(ArtifactError) as caught:
        verify(tmp_path / "demo@one")
    assert caught.value.hint == "build it: hyco-export demo; or give --target: three, two is built"


def test_a_file_of_somebody_else_is_named_and_what_desktops_leave_is_not(tmp_path: Path) -> None:
    publish(built(tmp_path), tmp_path / "demo", manifest())
    for name in (".DS_Store", ".nfs00000001", "._data.txt", "Thumbs.db"):
        (tmp_path / "demo" / name).write_text("x")
    assert sorted(verify(tmp_path / "demo").files) == ["data.txt"]
    (tmp_path / "demo" / "notes.md").write_text("x")
    with pytest.raises(StrayFileError, match=r"demo/notes.md is not in the manifest \(move or remove it"):
        verify(tmp_path / "demo")


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_every_file_is_as_readable_as_the_umask_says(tmp_path: Path, umask: int, mode: int) -> None:
    before = os.umask(umask)
    try:
        build = built(tmp_path)
        save_file({"a": np.zeros(4)}, build / "tensors.safetensors")
        publish(build, tmp_path / "demo", manifest())
    finally:
        os.umask(before)
    files = list((tmp_path / "demo").iterdir())
    assert len(files) == 3
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {mode}


def test_a_folder_without_a_manifest_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="holds no artifact"):
        read_manifest(tmp_path)


def test_key_depends_on_every_part() -> None:
    base = artifact_key("demo", 1, Config(), {"a": "1"}, {"s": "2"})
    assert base == artifact_key("demo", 1, Config(), {"a": "1"}, {"s": "2"})
    others = (
        artifact_key("other", 1, Config(), {"a": "1"}, {"s": "2"}),
        artifact_key("demo", 2, Config(), {"a": "1"}, {"s": "2"}),
        artifact_key("demo", 1, Config(5), {"a": "1"}, {"s": "2"}),
        artifact_key("demo", 1, Config(), {"a": "9"}, {"s": "2"}),
        artifact_key("demo", 1, Config(), {"a": "1"}, {"s": "9"}),
    )
    assert len({base, *others}) == 6


def finish_one(folder: Path) -> PartialBuild:
    partial = PartialBuild(folder)
    with partial.place("deep/a.txt") as draft:
        draft.write_text("content")
    partial.finish("a", ["deep/a.txt"], {"tokens": 3})
    return partial


def test_a_finished_unit_is_found_with_its_note(tmp_path: Path) -> None:
    finish_one(tmp_path)
    receipt = PartialBuild(tmp_path).finished("a")
    assert receipt is not None
    assert receipt.note == {"tokens": 3}
    assert list(receipt.files) == ["deep/a.txt"]
    assert PartialBuild(tmp_path).finished("b") is None


@pytest.mark.parametrize("content", ["contenu", "conten", None])
def test_a_unit_with_an_altered_cut_or_missing_file_is_not_finished(tmp_path: Path, content: str | None) -> None:
    partial = finish_one(tmp_path)
    path = tmp_path / "deep" / "a.txt"
    path.unlink() if content is None else path.write_text(content)
    assert partial.finished("a") is None


def test_a_damaged_receipt_is_none(tmp_path: Path) -> None:
    partial = finish_one(tmp_path)
    (receipt,) = (tmp_path / WORK_FOLDER).glob("a.*")
    receipt.write_bytes(receipt.read_bytes()[:-5])
    assert partial.finished("a") is None


def test_a_file_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    partial = PartialBuild(tmp_path)
    with pytest.raises(KeyboardInterrupt), partial.place("a.txt") as draft:
        draft.write_text("half")
        raise KeyboardInterrupt
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_a_forgotten_unit_leaves_nothing(tmp_path: Path) -> None:
    finish_one(tmp_path).forget("a", ["deep/a.txt"])
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
