"""The plan: what is fresh, why something is not, and what a manifest says of libraries."""

import platform
from pathlib import Path

import msgspec
import pytest

from hyco_export.core.artifact import MANIFEST_NAME
from hyco_export.errors import ArtifactError
from hyco_export.stages.declarations import Silent
from hyco_export.stages.plan import plan, require_current
from hyco_export.stages.runner import build_all
from tests.stages.test_runner import Recorder, run_folder, stages


def test_plan_says_why(tmp_path: Path, source: Path) -> None:
    run, table = run_folder(tmp_path), stages(source)
    assert [item.reason for item in plan(run, table)] == ["not built yet"] * 3
    build_all(run, table, Silent())
    assert [item.reason for item in plan(run, table)] == ["", "", ""]
    changed = plan(run_folder(tmp_path, steps=3), table)
    assert [item.reason for item in changed] == ["steps 600 -> 3", *2 * ["steps 600 -> 3, input a is rebuilt"]]
    assert [item.reason for item in plan(run, stages(source, revision=2))] == [
        "code revision 1 -> 2",
        *2 * ["input a is rebuilt"],
    ]
    source.write_text("another text")
    first, *others = [item.reason for item in plan(run, table)]
    assert first == f"data file {source} changed" and others == 2 * ["input a is rebuilt"]


def test_a_fresh_artifact_of_other_libraries_is_said_with_the_way_to_build_it_anew(
    tmp_path: Path, source: Path
) -> None:
    run, table = run_folder(tmp_path), stages(source)
    build_all(run, table, Silent())
    assert [item.remark for item in plan(run, table)] == ["", "", ""]
    manifest = run.root / "a" / MANIFEST_NAME
    content = msgspec.json.decode(manifest.read_bytes())
    content["versions"]["transformers"] = "5.0.0"
    manifest.write_bytes(msgspec.json.encode(content))
    first, *others = plan(run, table)
    assert first.fresh and "built with transformers 5.0.0, now " in first.remark
    assert [item.remark for item in others] == ["", ""]
    recorder = Recorder()
    build_all(run, table, recorder)
    assert recorder.notes[0].startswith("[1/3] a: fresh, built with transformers 5.0.0, now ")
    assert first.remark.endswith("; to build it and what is made of it anew: --rebuild")
    again = plan(run, table, rebuild=True)
    assert again[0].reason.startswith("built with transformers 5.0.0, now ")
    assert [item.reason for item in again[1:]] == 2 * ["input a is rebuilt"]


@pytest.mark.parametrize(
    ("versions", "words"),
    [
        ({}, "its manifest names no library that it was built with; to build it"),
        ({"gone-library": "1.2"}, "built with gone-library 1.2, now not installed; to build it"),
        ({"python": "3.0.1"}, f"built with python 3.0.1, now {platform.python_version()}; to build it"),
    ],
)
def test_what_a_manifest_says_of_libraries_is_never_passed_over(
    tmp_path: Path, source: Path, versions: dict[str, str], words: str
) -> None:
    run, table = run_folder(tmp_path), stages(source)
    build_all(run, table, Silent())
    manifest = run.root / "a" / MANIFEST_NAME
    content = msgspec.json.decode(manifest.read_bytes())
    assert content["versions"]["python"] == platform.python_version()
    content["versions"] = versions
    manifest.write_bytes(msgspec.json.encode(content))
    assert plan(run, table)[0].remark.startswith(words)


def test_artifacts_of_another_recipe_or_code_are_named(tmp_path: Path, source: Path) -> None:
    run, table = run_folder(tmp_path), stages(source)
    with pytest.raises(ArtifactError, match="holds no artifact"):
        require_current(run, table)
    build_all(run, table, Silent())
    require_current(run, table)
    with pytest.raises(ArtifactError, match="a was built with other settings or code than recipe tiny asks for"):
        require_current(run_folder(tmp_path, steps=3), table)
    with pytest.raises(ArtifactError, match="hyco-export a"):
        require_current(run, stages(source, revision=2))
