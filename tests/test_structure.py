"""Tests mirror the package, the record of slow tests names tests that exist, and shared folders are built once."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support.durations import RECORD, is_slow, merged, read_record
from tests.support.shared import built_once

ROOT = Path(__file__).resolve().parents[1]
PACKAGE, TESTS = ROOT / "hyco_export", ROOT / "tests"
MIRRORED_SHARE = 0.8


def modules() -> list[Path]:
    """The package's modules, relative to it; those that only say what a room is are none."""
    found = sorted(path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py"))
    return [path for path in found if not path.name.startswith("__")]


def test_most_modules_have_a_test_module_of_their_name() -> None:
    found = modules()
    assert len(found) > 150
    without = [path.as_posix() for path in found if not (TESTS / path.with_name(f"test_{path.name}")).exists()]
    share = 1 - len(without) / len(found)
    listed = "\n".join(without)
    assert share >= MIRRORED_SHARE, f"{share:.0%} of modules have tests/<room>/test_<module>.py; without:\n{listed}"


def test_no_test_module_is_named_after_a_module_of_another_room() -> None:
    """A test module that carries a module's name stands in that module's room."""
    rooms: dict[str, set[str]] = {}
    for path in modules():
        rooms.setdefault(path.stem, set()).add(path.parent.as_posix())
    checked = 0
    for path in TESTS.rglob("test_*.py"):
        if (expected := rooms.get(path.stem.removeprefix("test_"))) is not None:
            checked += 1
            assert path.parent.relative_to(TESTS).as_posix() in expected, path
    assert checked > 100


def test_the_record_of_slow_tests_names_tests_and_fixtures_that_exist() -> None:
    record = read_record()
    named = [*record["tests"], *record["fixtures"]]
    assert named
    for name in named:
        place, _, rest = name.partition("::")
        path = ROOT / place
        files = [path / "conftest.py"] if path.is_dir() else [path]
        function = rest.rpartition("::")[2].partition("[")[0]
        assert any(f"def {function}(" in file.read_text(encoding="utf-8") for file in files), (
            f"{RECORD.name} names {name}, which is gone: make durations"
        )


def test_a_recorded_test_or_fixture_makes_a_test_slow() -> None:
    record = {"fixtures": {"tests/graph::compiled": 9.0}, "tests": {"tests/a.py::test_b[1]": 7.0}}
    assert is_slow("tests/a.py::test_b[1]", [], record)
    assert not is_slow("tests/a.py::test_b[2]", ["tests/graph::other"], record)
    assert is_slow("tests/a.py::test_c", ["tests/graph::other", "tests/graph::compiled"], record)


def test_a_new_record_keeps_what_the_run_did_not_touch() -> None:
    record = {"quick now": 8.0, "not run": 6.0, "slower": 7.0}
    assert merged(record, {"quick now": 0.2, "slower": 12.34, "new": 5.01, "fast": 4.9}) == {
        "new": 5.0,
        "not run": 6.0,
        "slower": 12.3,
    }


def test_what_workers_share_is_built_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTEST_XDIST_WORKER", "gw0")
    built: list[Path] = []

    def build(folder: Path) -> None:
        built.append(folder)
        (folder / "part").write_text("whole")

    def worker(number: int) -> Path:
        folder = tmp_path / f"popen-gw{number}"
        folder.mkdir()
        return built_once(SimpleNamespace(getbasetemp=lambda: folder), "once", build)

    with ThreadPoolExecutor(4) as workers:
        assert list(workers.map(worker, range(4))) == [tmp_path / "shared" / "once"] * 4
    assert built == [tmp_path / "shared" / "once"]


def test_a_build_that_failed_is_made_anew(tmp_path_factory: pytest.TempPathFactory) -> None:
    def fail(folder: Path) -> None:
        (folder / "half").touch()
        raise OSError("full")

    with pytest.raises(OSError, match="full"):
        built_once(tmp_path_factory, "failing", fail)
    folder = built_once(tmp_path_factory, "failing", lambda folder: (folder / "whole").touch())
    assert [path.name for path in folder.iterdir()] == ["whole"]
