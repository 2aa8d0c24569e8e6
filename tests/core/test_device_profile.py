"""A profile counts for the graphs that it was measured on."""

from pathlib import Path

import pytest

from hyco_export.core.artifact import Manifest, publish
from hyco_export.core.device_profile import (
    PROFILE_FILE,
    DeviceProfile,
    GraphProfile,
    graphs_key,
    read_profile,
    write_profile,
)
from hyco_export.errors import ArtifactError

GRAPH = GraphProfile(1.5, 3, None, None, 0, None, "j1", ())


def compiled(run: Path, key: str) -> Manifest:
    (run / ".build").mkdir(parents=True)
    manifest = Manifest("compile", 1, "any", {}, {"convert-slm": key}, {}, {}, {}, {}, 0.1)
    publish(run / ".build", run / "compile@sm8850", manifest)
    return manifest


def test_a_profile_of_older_graphs_or_another_target_is_none(tmp_path: Path) -> None:
    manifest = compiled(tmp_path, "a")
    assert read_profile(tmp_path, "sm8850") is None
    profile = DeviceProfile("phone", "16", "sm8850", graphs_key(manifest), "AI Hub", {"head": GRAPH})
    write_profile(tmp_path, profile)
    assert read_profile(tmp_path, "sm8850") == profile
    compiled(tmp_path, "b")
    assert read_profile(tmp_path, "sm8850") is None
    (tmp_path / PROFILE_FILE).write_text("{")
    with pytest.raises(ArtifactError, match="cannot be read"):
        read_profile(tmp_path, "sm8850")
