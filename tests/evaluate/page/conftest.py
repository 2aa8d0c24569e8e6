"""Folders of measurements, read once; nothing here changes them."""

from pathlib import Path

import pytest

from hyco_export.evaluate.page.page import write_page
from hyco_export.evaluate.page.sources import Source, read_sources
from hyco_export.evaluate.page.texts import Texts
from tests.evaluate.page.folders import bench_folder, evaluation_folder, run_folder


@pytest.fixture(scope="package")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("measured")
    return {
        "bench": bench_folder(base / "a-bench"),
        "evaluation": evaluation_folder(base / "an-evaluation"),
        "run": run_folder(base / "a-run"),
    }


@pytest.fixture(scope="package")
def page(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All of them on one page, without a tokenizer."""
    path = tmp_path_factory.mktemp("page") / "report.html"
    write_page(read_sources(list(folders.values())), Texts(), path)
    return path


@pytest.fixture(scope="package")
def bench(folders: dict[str, Path]) -> Source:
    return read_sources([folders["bench"]])[0]


@pytest.fixture(scope="package")
def evaluation(folders: dict[str, Path]) -> Source:
    return read_sources([folders["evaluation"]])[0]
