"""Binaries whose graphs are named for the device."""

from pathlib import Path

from hyco_export.bundle.spec import open_bundle
from hyco_export.core.artifact import file_digest
from tests.evaluate.diagnosis.small_run import SmallRun


def test_the_copied_binary_differs_in_its_names_alone(bundle_folder: Path, small_run: SmallRun) -> None:
    bundle = open_bundle(bundle_folder)
    for name, graph in bundle.graphs.items():
        source = small_run.root / f"compile@{small_run.recipe.target}" / f"{name}_ctx_qnn.bin"
        assert file_digest(source) == graph.compiled_sha256
        old, new = source.read_bytes(), (bundle_folder / graph.binary).read_bytes()
        assert len(old) == len(new) and old.count(graph.compiled_name.encode()) > 0
        assert new.count(graph.compiled_name.encode()) == 0
        changed = sum(a != b for a, b in zip(old, new, strict=True))
        assert changed <= old.count(graph.compiled_name.encode()) * (len(graph.compiled_name) + 16)
