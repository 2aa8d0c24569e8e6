"""What the commands ask before they do anything heavy, and who may work in a run folder at once."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

from hyco_export.cli import app, invocation, validation
from hyco_export.cli import run as commands
from hyco_export.cli.connection import ConnectOptions
from hyco_export.cli.serve import ListenOptions, named_host, validate_line
from hyco_export.core.files import folder_lock
from hyco_export.errors import ArtifactError, HycoError, StorageError, UnreachableError
from hyco_export.stages.run_folder import RunFolder

URL = "http://here:1"


def test_a_damaged_artifact_is_named_before_anything_heavy(run: RunFolder) -> None:
    with pytest.raises(ArtifactError, match=r"keepset.safetensors is not the file that was built"):
        validation.subject_of(run)


def test_two_validations_cannot_share_a_folder(run: RunFolder) -> None:
    other = RunFolder(run.root, run.recipe, None)
    with other.lock(), pytest.raises(ArtifactError, match="another process is building or validating in"):
        validation.validate_in(run, URL, ConnectOptions())


def test_a_run_folder_that_cannot_be_written_is_validated_into_another_one(
    run: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its lock cannot be opened, as where the file system is read-only: root may write anywhere else."""
    out = tmp_path / "out"
    (run.root / ".lock").mkdir(parents=True)
    before = sorted(run.root.rglob("*"))
    monkeypatch.setattr("hyco_export.stages.run_folder.os.access", lambda path, mode: False)
    with pytest.raises(StorageError, match=r"cannot be written \(say where the report goes: --out DIR\)"):
        validation.validate_in(run, URL, ConnectOptions())
    with pytest.raises(UnreachableError):
        validation.validate_in(run, "http://127.0.0.1:9", ConnectOptions(), out=out)
    assert '"could not run"' in (out / "report.json").read_text()
    assert sorted(path.name for path in out.iterdir()) == [".lock", "report.html", "report.json", "traces"]
    with folder_lock(out, "folder", "validating", "--out"), pytest.raises(ArtifactError, match="give --out"):
        validation.validate_in(run, URL, ConnectOptions(), out=out)
    assert sorted(run.root.rglob("*")) == before


def test_a_writable_run_folder_stays_locked_while_the_report_goes_elsewhere(run: RunFolder, tmp_path: Path) -> None:
    other = RunFolder(run.root, run.recipe, None)
    with other.lock(), pytest.raises(ArtifactError, match="another process is building or validating in"):
        validation.validate_in(run, URL, ConnectOptions(), out=tmp_path / "out")
    assert not (run.root / "validate").exists()


def test_a_run_keeps_its_folder_from_the_first_stage_to_the_report(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def intrude(*_: object) -> None:
        other = RunFolder(run.root, run.recipe, None)
        with pytest.raises(ArtifactError, match="is building or validating in"), other.lock():
            pass
        seen.append("kept")

    seen: list[str] = []
    monkeypatch.setattr(commands, "open_run", lambda *_: run)
    monkeypatch.setattr(commands, "build_chain", intrude)
    monkeypatch.setattr(commands, "server_process", _Served)
    monkeypatch.setattr(commands, "validate_in", intrude)
    commands.run_everything(None, None, None, None, dry_run=False)
    assert seen == ["kept", "kept"]
    with RunFolder(run.root, run.recipe, None).lock():
        pass  # it is free again


class _Served:
    def __init__(self, *_: object) -> None:
        pass

    def __enter__(self) -> "_Served":
        return self

    url = URL

    def require_running(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass


def listen_options(**given: object) -> ListenOptions:
    usual = {"host": "127.0.0.1", "port": 8411, "certificate": None, "key": None, "token_file": None}
    return ListenOptions(**{**usual, "insecure": False, "pad_bytes": 0, **given})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("built", "line"),
    [
        ([], ""),
        (["sm8850"], "validate --server http://h:1"),
        (["sm8750"], "validate --server http://h:1 --target sm8750"),
        (["sm8750", "sm8850"], "validate --server http://h:1"),
        (["sm8750", "sm8650"], ""),  # which one is not for this line to say
    ],
)
def test_a_server_names_the_command_that_validates_what_is_built(
    run: RunFolder, called: None, built: list[str], line: str
) -> None:
    for target in built:
        (run.root / f"compile@{target}").mkdir()
        (run.root / f"compile@{target}" / "manifest.json").touch()
    assert run.recipe.target == "sm8850"
    found = validate_line(run, listen_options(), "http://h:1", 0)
    assert found == (f"next, in another shell: hyco-export {line}" if line else "")


def test_the_command_that_validates_shows_the_token_that_there_is(run: RunFolder, called: None) -> None:
    (run.root / "compile@sm8850").mkdir()
    (run.root / "compile@sm8850" / "manifest.json").touch()
    guarded = listen_options(token_file=Path("my tokens"))
    one, two = (validate_line(run, guarded, "http://h:1", tokens) for tokens in (1, 2))
    assert one == "next, in another shell: hyco-export validate --server http://h:1 --token-file 'my tokens'"
    assert two == (
        "next, in another shell (with one of the tokens in HYCO_TOKEN): hyco-export validate --server http://h:1"
    )


def test_the_url_to_call_has_a_name_of_the_certificate() -> None:
    assert named_host("0.0.0.0", ()) == "0.0.0.0"
    assert named_host("0.0.0.0", ("*.example", "verifier.example")) == "verifier.example"
    assert named_host("0.0.0.0", ("verifier.example", "127.0.0.1")) == "0.0.0.0"
    assert named_host("::1", ("0:0:0:0:0:0:0:1",)) == "::1"
    assert named_host("10.0.0.1", ("*.example",)) == "10.0.0.1"


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A `serve` without options, of a program that the shell finds by its name."""
    monkeypatch.setattr(sys, "argv", ["-c"])
    group = typer.main.get_command(app.app)
    parent = group.make_context("hyco-export", ["serve"])
    invocation._called[:] = [group.commands["serve"].make_context("serve", [], parent=parent)]
    yield
    invocation._called.clear()


def test_a_validation_that_cannot_run_leaves_no_old_verdict(run: RunFolder) -> None:
    folder = run.root / "validate"
    folder.mkdir(parents=True)
    (folder / "report.json").write_text('{"verdict": "pass", "gates": []}')
    (folder / "report.html").write_text("Passed")
    with pytest.raises(HycoError):
        validation.validate_in(run, "http://127.0.0.1:9", ConnectOptions())
    assert '"could not run"' in (folder / "report.json").read_text()
    assert "Passed" not in (folder / "report.html").read_text()
    assert (folder / "earlier.html").read_text() == "Passed"
