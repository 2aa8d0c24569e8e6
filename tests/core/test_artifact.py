"""Artifacts: published whole or not at all, and checked file by file when read back."""

from pathlib import Path

import msgspec
import pytest

from hyco_export.core.artifact import (
    MANIFEST_NAME,
    Manifest,
    artifact_key,
    publish,
    read_manifest,
    verify,
)
from hyco_export.errors import ArtifactError


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
        (lambda folder: (folder / "extra").write_text("x"), "is not in the manifest"),
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
