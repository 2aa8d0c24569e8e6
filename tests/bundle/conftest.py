"""A bundle of a small run: built once for all tests here, binaries and emulator included."""

from pathlib import Path

import pytest
import torch

from hyco_export.bundle.folder import build_bundle
from hyco_export.evaluate.connect import Subject, open_artifacts
from tests.evaluate.diagnosis.small_run import SmallRun, build_small_run


@pytest.fixture(scope="session")
def small_run(tmp_path_factory: pytest.TempPathFactory) -> SmallRun:
    torch.set_num_threads(1)
    return build_small_run(tmp_path_factory.mktemp("bundled"))


@pytest.fixture(scope="session")
def subject(small_run: SmallRun) -> Subject:
    recipe = small_run.recipe
    artifacts = open_artifacts(small_run.root, recipe.target)
    return Subject(small_run.root, recipe, artifacts, small_run.checkpoints, Path("unused"))


@pytest.fixture(scope="session")
def bundle_folder(subject: Subject, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("bundles") / "bundle"
    build_bundle(subject, out, lambda label, done, total: None)
    return out
