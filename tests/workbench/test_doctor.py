"""Checks say what is there, what it blocks and what helps; nothing secret; exit code 1 when something is blocked."""

from pathlib import Path

import pytest
from packaging.requirements import Requirement

from hyco_export.cloud import client
from hyco_export.core.artifact import Manifest, publish
from hyco_export.core.recipe_loading import embedded_recipe, load_recipe
from hyco_export.errors import UnreachableError
from hyco_export.protocol import wire
from hyco_export.stages.run_folder import RunFolder
from hyco_export.workbench import doctor
from hyco_export.workbench.doctor import compare_libraries, examine_machine, examine_run, examine_server
from tests.support.fake_hub import TOKEN

INFO = wire.ServerInfo(1, "test 1", "v", "t", 16, [1], "h", "", 32, 64, 4, ["exact"], "thread-cpu")


@pytest.fixture(autouse=True)
def logins(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "client.ini").write_text(f"[api]\napi_token = {TOKEN}\n")
    monkeypatch.setenv(client.CONFIG_VARIABLE, str(tmp_path / "client.ini"))
    monkeypatch.setenv("HF_TOKEN", f"hf_{TOKEN}")


def run_of(root: Path) -> RunFolder:
    return RunFolder(root, load_recipe(embedded_recipe()), None)


def artifact(run: Path, name: str) -> Path:
    (run / ".build").mkdir(parents=True)
    (run / ".build" / "a.txt").write_text("x")
    publish(run / ".build", run / name, Manifest(name, 1, "k", {}, {}, {}, {}, {}, {}, 0.1))
    return run / name


def test_the_machine_is_examined_without_showing_tokens(tmp_path: Path) -> None:
    checks = {check.name: check for check in examine_machine(tmp_path / "runs" / "x")}
    assert set(checks) == {
        "Python", "libraries", "C compiler", "GPU", "memory", "disk", "NPU libraries", "Hub", "AI Hub", "terminal",
    }  # fmt: skip
    assert checks["NPU libraries"].state == "fine" and "QAIRT 2." in checks["NPU libraries"].found
    assert checks["AI Hub"].state == "fine"
    assert "logged in" in checks["Hub"].found
    assert TOKEN not in repr(checks)
    assert not (tmp_path / "runs").exists()
    for check in checks.values():
        assert (check.state == "fine") == (check.blocks == check.next == "")


def test_libraries_are_held_against_requirements_and_pins() -> None:
    required = [Requirement(text) for text in ("numpy>=1", "no-such-library>=1", "msgspec>=99", "huggingface-hub>=1")]
    missing, old, other = compare_libraries(required, {"numpy": "0.1", "huggingface_hub": "0.2"})
    assert missing == ["no-such-library"]
    assert len(old) == 1 and old[0].startswith("msgspec ") and old[0].endswith("needed >=99")
    assert [line.split()[0] for line in other] == ["numpy", "huggingface-hub"]


def test_what_is_missing_blocks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(doctor, "_required", lambda: [Requirement("no-such-library")])
    monkeypatch.setattr(doctor, "LARGE_COMPILE_BYTES", 10**18)
    monkeypatch.setattr("hyco_export.graph.smaller_binaries.find_compiler", lambda: None)
    checks = {check.name: check for check in examine_machine(tmp_path)}
    assert checks["libraries"].state == "blocked" and "no-such-library is missing" in checks["libraries"].found
    assert checks["C compiler"].state == "note" and "two_bit_weights" in checks["C compiler"].blocks
    assert checks["memory"].state == "note" and "E2B" in checks["memory"].blocks


def test_a_run_folder_is_examined_artifact_by_artifact(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run")
    artifact(run.root, "capture")
    damaged = artifact(run.root, "build-keepset")
    (damaged / "a.txt").write_text("y")
    states = {check.name: check.state for check in examine_run(run)}
    assert states == {
        "place": "fine", "capture": "fine", "qat-head": "note", "build-keepset": "blocked", "convert-head": "note",
        "convert-slm": "note", "compile@sm8850": "note",
    }  # fmt: skip


def test_a_server_answers_or_blocks() -> None:
    class Transport:
        def info(self) -> wire.ServerInfo:
            return INFO

    def dead() -> Transport:
        raise UnreachableError("no answer", "start it")

    (check,) = examine_server("http://x", Transport)
    assert check.state == "fine" and "test 1" in check.found and "32 nodes" in check.found
    (check,) = examine_server("http://x", dead)
    assert (check.state, check.found, check.next) == ("blocked", "no answer", "start it")
