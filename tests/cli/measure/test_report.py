"""`report`: which texts it shows, what it prints, what it refuses."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from hyco_export.cli.app import app
from hyco_export.cli.measure.report import find_texts
from hyco_export.core.files import resource_path
from hyco_export.errors import StorageError
from hyco_export.evaluate.page.sources import read_sources
from hyco_export.evaluate.traces import write_traces
from hyco_export.models.checkpoints import checkpoint_digest
from tests.evaluate.page.folders import answers, bench_folder

VERIFIER = resource_path("hyco_export/dev/tiny/checkpoints/verifier")


def test_it_writes_the_page_and_says_how_to_go_on(tmp_path: Path) -> None:
    folder = bench_folder(tmp_path / "bench", 2, 2)
    done = CliRunner().invoke(app, ["report", str(folder)])
    assert done.exit_code == 0, done.output
    assert (folder / "report.html").is_file()
    told = " ".join(done.output.split())
    assert "1 folder, 8 rounds" in told and f"replay {folder}/hyco.jsonl" in told
    assert "another verifier than was measured" in told  # the digest of no checkpoint


def test_several_folders_go_into_the_file_that_is_named(tmp_path: Path) -> None:
    one, other = bench_folder(tmp_path / "one", 2, 2), bench_folder(tmp_path / "other", 2, 2)
    out = tmp_path / "both.html"
    done = CliRunner().invoke(app, ["report", str(one), str(other), "--out", str(out), "--rounds", "8"])
    told = " ".join(done.output.split())
    assert done.exit_code == 0 and "2 folders, 16 rounds" in told
    assert "one answer in 2; --rounds 16 holds all" in told
    assert "Side by side" in out.read_text()


def test_texts_are_shown_where_the_recipes_verifier_is_the_one_that_was_measured(tmp_path: Path) -> None:
    folder = bench_folder(tmp_path / "bench", 2, 2)
    plan = (folder / "plan.json").read_text()
    (folder / "plan.json").write_text(plan.replace("f" * 64, checkpoint_digest(VERIFIER)))
    texts, note = find_texts(read_sources([folder]), None, None)
    assert texts.known and not note and texts.prompt("validation-01")


def test_traces_that_say_no_verifier_need_a_recipe(tmp_path: Path) -> None:
    write_traces(tmp_path / "logged" / "hyco.jsonl", answers("hyco", 1, 2))
    sources = read_sources([tmp_path / "logged"])
    texts, note = find_texts(sources, None, None)
    assert not texts.known and "do not say which verifier" in note
    texts, note = find_texts(sources, Path("tiny"), None)
    assert texts.known and not note


def test_a_folder_in_the_pages_place_is_refused_by_its_own_name(tmp_path: Path) -> None:
    folder, taken = bench_folder(tmp_path / "bench", 2, 2), tmp_path / "taken"
    taken.mkdir()
    done = CliRunner().invoke(app, ["report", str(folder), "--out", str(taken)])
    assert isinstance(done.exception, StorageError)
    assert done.exception.message == f"{taken} is a folder"
    assert done.exception.hint == f"give a file: --out {taken}/report.html"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bench", "taken"] and not list(taken.iterdir())


@pytest.mark.parametrize("given", ["nowhere", "."])
def test_a_folder_without_a_measurement_is_refused_and_nothing_written(tmp_path: Path, given: str) -> None:
    done = CliRunner().invoke(app, ["report", str(tmp_path / given)])
    assert (done.exit_code != 0 and "holds no plan" in str(done.exception)) or "does not exist" in str(done.exception)
    assert not list(tmp_path.iterdir())
