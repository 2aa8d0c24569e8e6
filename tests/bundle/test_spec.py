"""bundle.json: every file with its hash, the specs of the graphs."""

import shutil
from pathlib import Path

import msgspec
import pytest

from hyco_export.bundle.spec import open_bundle
from hyco_export.core.artifact import HEAD
from hyco_export.core.device_spec import HEAD_SPEC_FILE, HeadSpec, read_spec
from hyco_export.errors import ArtifactError
from tests.evaluate.diagnosis.small_run import SmallRun


def test_bundle_json_lists_every_file_and_the_specs(bundle_folder: Path, small_run: SmallRun) -> None:
    bundle = open_bundle(bundle_folder)
    files = {path.relative_to(bundle_folder).as_posix() for path in bundle_folder.rglob("*") if path.is_file()}
    assert files == {*bundle.files, "bundle.json"}
    head = read_spec(small_run.root / HEAD / HEAD_SPEC_FILE, HeadSpec)
    assert bundle.head_spec == head
    assert msgspec.structs.asdict(bundle.slm_spec)["rings"] == {"sliding": 8, "full": 12}
    assert bundle.tolerance.range_share == small_run.recipe.compile.output_range_share


def test_an_altered_file_is_named(bundle_folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(bundle_folder, copy)
    (copy / "consumer.py").write_text((copy / "consumer.py").read_text().replace("ROOT", "R00T"))
    with pytest.raises(ArtifactError, match=r"consumer\.py is not the file that was written"):
        open_bundle(copy)
    (copy / "consumer.py").unlink()
    with pytest.raises(ArtifactError, match=r"consumer\.py is missing"):
        open_bundle(copy)
