"""The command line from outside: what it refuses, what it says then, and what it imports before it refuses."""

import os
import re
import resource
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

import hyco_export
from hyco_export.core.artifact import Manifest, publish
from hyco_export.evaluate.replay import PAPER_EPSILON
from hyco_export.protocol.security import read_tokens
from hyco_export.protocol.wire import Acceptance
from tests.support.interrupts import started

FILE_LIMIT_BYTES = 20_000
RULE = Acceptance("typical", 1.0)
HEAVY = ("torch", "transformers", "onnx", "onnxruntime")
WATCHED = f"""
import sys
from hyco_export.cli import main
try:
    main()
finally:
    sys.stderr.write("heavy: " + ",".join(name for name in {HEAVY!r} if name in sys.modules) + "\\n")
"""


def run(*arguments: str, cwd: Path | None = None, columns: int = 80) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own; its last line on stderr says which heavy modules it imported."""
    environment = {**os.environ, "COLUMNS": str(columns), "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", WATCHED, *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=cwd, check=False)


def refused(*arguments: str) -> str:
    """stderr of a command that must end with exit code 2 before anything heavy is imported."""
    done = run(*arguments)
    assert done.returncode == 2, done
    assert done.stderr.endswith("heavy: \n"), done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr


@pytest.mark.parametrize(
    ("systems", "message"),
    [
        ("", "--systems names no system next: give at least one"),
        (" , ", "--systems names no system"),
        ("hyco,hyco", "--systems is 'hyco,hyco', names must be unique"),
        ("hyco,hycoo", "unknown system 'hycoo'"),
        ("on-device,hyco", "on-device asks no server, the others cannot be compared with it next: put another"),
    ],
)
def test_a_benchmark_of_systems_that_cannot_be_compared_is_refused_before_a_server_is_started(
    systems: str, message: str
) -> None:
    assert message in " ".join(refused("bench", "--systems", systems).split())


def test_targets_fit_eighty_columns() -> None:
    done = run("targets")
    lines = [line.rstrip() for line in done.stdout.splitlines() if line.strip()]
    assert len(lines) == 2 + 7  # title, header, one line a target
    assert all(re.search(r"v\d\d, 8 MB", line) for line in lines[2:])
    assert max(map(len, lines)) <= 80


def test_folders_that_are_no_artifact_are_told_apart(tmp_path: Path) -> None:
    assert "is no artifact" in refused("inspect", str(tmp_path))
    (tmp_path / "capture").mkdir()
    (tmp_path / "capture" / "manifest.json").write_text("{}")
    message = refused("inspect", str(tmp_path))
    assert "is a run folder with 1 artifact: capture" in message
    assert f"hyco-export inspect {tmp_path / 'capture'}" in message
    assert "cannot be read" in refused("inspect", str(tmp_path / "capture"))


def test_inspect_compares_a_binary_with_the_manifest_beside_it(tmp_path: Path) -> None:
    assert f"{tmp_path / 'none.bin'} does not exist" in refused("inspect", str(tmp_path / "none.bin"))
    assert f"{tmp_path / 'none'} does not exist" in refused("inspect", str(tmp_path / "none"))
    (tmp_path / "build").mkdir()
    binary = tmp_path / "build" / "x.bin"
    binary.write_bytes(b"content")
    artifact = Manifest("compile", 1, "k", {}, {}, {}, {}, {}, {}, 0.1)
    publish(binary.parent, tmp_path / "compile", artifact)
    binary = tmp_path / "compile" / "x.bin"
    binary.write_bytes(b"Content")
    assert "is not the file that was built (size or sha256 differs)" in refused("inspect", str(binary))
    (tmp_path / "compile" / "y.bin").write_bytes(b"content")
    (tmp_path / "my runs").mkdir()
    (tmp_path / "compile").rename(tmp_path / "my runs" / "compile")
    line = f"hyco-export compile --run '{tmp_path / 'my runs'}', with --recipe unless it is the embedded family's"
    (tmp_path / "my runs" / "compile" / "y.bin").write_bytes(b"content")
    assert line in refused("inspect", str(tmp_path / "my runs" / "compile" / "x.bin"))
    (tmp_path / "my runs" / "compile").rename(tmp_path / "compile")
    assert "y.bin is not in the manifest" in refused("inspect", str(tmp_path / "compile" / "y.bin"))


def test_existing_folders_and_taken_ports_are_refused_at_once(tmp_path: Path) -> None:
    for command in ("train-tiny", "create-checkpoints"):
        assert "exists already" in refused("dev", command, str(tmp_path))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"cannot listen on 127.0.0.1:{port}" in refused("serve", "--port", str(port), "--run", str(tmp_path))


def test_a_server_is_not_opened_to_others_by_accident(tmp_path: Path) -> None:
    common = ("serve", "--port", "0", "--run", str(tmp_path))
    assert "there is no TLS and no token" in refused(*common, "--host", "0.0.0.0")
    assert "--tls-cert and --tls-key belong together" in refused(*common, "--tls-cert", str(tmp_path / "cert.pem"))
    assert "cannot be used: No such file" in refused(*common, "--tls-cert", "none.pem", "--tls-key", "none.pem")
    secret = tmp_path / "tokens"
    secret.write_text("secret-but-short")
    secret.chmod(0o644)
    assert "can be read by every user" in refused(*common, "--token-file", str(secret))
    help_text = run("serve", "--help").stdout + run("validate", "--help").stdout
    assert "--token-file" in help_text and "--token " not in help_text  # a flag's value can be seen by every user


def test_what_is_no_address_is_not_called_one_that_others_reach(tmp_path: Path) -> None:
    for host in ("300.1.1.1", "1:2"):
        message = refused("serve", "--host", host, "--port", "0", "--run", str(tmp_path))
        assert f"cannot listen on {host}: it is no IP address" in message and "other machines" not in message


def test_the_hint_for_a_token_makes_the_file_it_names(tmp_path: Path) -> None:
    path = tmp_path / "my token"
    message = refused("validate", "--server", "http://127.0.0.1:9", "--token-file", str(path))
    line = re.search(r"make one with: (.*)\n", message)
    assert line is not None
    subprocess.run(line[1].replace("python", shlex.quote(sys.executable), 1), shell=True, check=True)
    assert path.stat().st_mode & 0o777 == 0o600
    assert len(read_tokens(path)) == 1
    path.write_text("# none yet")
    assert f"holds no token\n  next: make one with: {line[1]}\n" in refused(
        "serve", "--token-file", str(path), "--port", "0"
    )


def test_help_names_defaults_and_what_an_option_takes() -> None:
    replay = " ".join(run("replay", "--help", columns=200).stdout.split())
    wanted = {
        "epsilon": PAPER_EPSILON,
        "posterior-threshold": RULE.posterior_threshold,
        "posterior-alpha": RULE.posterior_alpha,
    }
    for option, value in wanted.items():
        assert re.search(rf"--{option} [^-]*Default: {value}\.", replay), option
    assert "File with the bearer token." in run("validate", "--help", columns=200).stdout
    assert "File of bearer tokens, one a line." in run("serve", "--help", columns=200).stdout
    counting = run("dev", "bench-counting", "--help", columns=200).stdout
    assert "[RECIPE]" in counting and "[[RECIPE]]" not in counting


def test_the_version_is_printed_alone() -> None:
    done = run("--version")
    assert (done.returncode, done.stdout) == (0, f"hyco-export {hyco_export.__version__}\n")


def test_developers_commands_stand_in_a_group_of_their_own() -> None:
    listed, group = run("--help").stdout, run("dev", "--help").stdout
    for name in ("train-tiny", "create-checkpoints", "bench-peers", "bench-counting"):
        assert name in group and name not in listed
        assert run(name, "--help").returncode == 0  # the name it had before
    assert "--install-completion" in listed
    assert "fit-estimates" in group and "fit-estimates" not in listed
    assert run("fit-estimates", "--help").returncode == 2  # it never stood outside the group
    unknown = run("dev", "fit-estimates", "--scale", "huge")
    assert unknown.returncode == 2
    assert "--scale is 'huge'" in unknown.stderr and "next: give one of: full, thin, middle, small" in unknown.stderr


def test_padding_to_more_than_any_client_takes_is_refused() -> None:
    assert "Invalid value for '--pad-replies'" in refused("serve", "--pad-replies", "100000000")


def test_unknown_links_are_refused_with_the_known_ones(tmp_path: Path) -> None:
    message = refused("validate", "--server", "http://127.0.0.1:9", "--run", str(tmp_path), "--link", "isdn")
    assert "unknown link 'isdn'" in message and "known ones: lte, 5g-nsa, wifi" in message


def test_a_client_shows_one_token(tmp_path: Path) -> None:
    several = tmp_path / "tokens"
    several.touch(mode=0o600)
    several.write_text("first-0123456789abcdef\nsecond-0123456789abcdef\n")
    message = refused("validate", "--server", "http://127.0.0.1:9", "--token-file", str(several))
    assert "holds 2 tokens, a client shows one" in message and "0123456789abcdef" not in message


def test_a_run_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = run("capture", "--run", str(tmp_path / "file" / "run"))
    assert done.returncode == 2
    assert f"run folder {tmp_path / 'file' / 'run'} cannot be made" in done.stderr
    assert "next: make room there, or give another folder with --run" in done.stderr


def test_a_dry_run_refuses_the_folder_that_a_run_would(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        done = run("run", "--dry-run", "--run", str(folder))
        assert done.returncode == 2, done
        assert f"run folder {folder} cannot be made or written: {tmp_path / 'file'} is not a folder" in done.stderr
    assert run("capture", "--dry-run", "--run", str(tmp_path / "new" / "deep")).returncode == 0
    assert not (tmp_path / "new").exists()


def test_a_lock_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / ".lock").mkdir()
    done = run("capture", "--run", str(tmp_path))
    assert done.returncode == 2
    assert f"run folder {tmp_path} cannot be made or written: Is a directory: {tmp_path / '.lock'}" in done.stderr
    assert "Traceback" not in done.stderr


def test_files_that_the_system_refuses_are_one_line(tmp_path: Path) -> None:
    def allow_small_files() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_LIMIT_BYTES, FILE_LIMIT_BYTES))

    command = [
        sys.executable,
        "-m",
        "hyco_export",
        "dev",
        "create-checkpoints",
        str(tmp_path / "new"),
        "--scale",
        "small",
    ]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment, preexec_fn=allow_small_files, check=False
    )
    assert done.returncode == 2, done
    assert "error: " in done.stderr and "File too large" in done.stderr
    assert "next: make room" in done.stderr
    assert "Traceback" not in done.stderr


def test_an_unforeseen_error_does_not_end_as_a_failed_gate() -> None:
    script = "from hyco_export.cli import app\ndef fail(): raise KeyError('unforeseen')\napp.app = fail\napp.main()"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 3
    assert "KeyError: 'unforeseen'" in done.stderr and "Traceback" in done.stderr


def test_a_reader_that_leaves_does_not_end_as_a_failed_gate(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "hyco_export", "targets"]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, env=environment, check=False)
    os.close(writer)
    assert done.returncode == 141, done


@pytest.mark.skipif(not hasattr(signal, "SIGINT"), reason="no signals")
def test_an_interrupt_says_what_is_kept(tmp_path: Path) -> None:
    process = started("capture", "--run", str(tmp_path / "run"))
    while not list(tmp_path.glob("run/.build/*")) and process.poll() is None:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    nothing = "interrupted before anything was finished: nothing is kept, the same command begins anew"
    kept = f"interrupted; kept: what is done of capture in {tmp_path / 'run'}; the same command goes on from there"
    assert errors == f"{kept if list(tmp_path.glob('run/.build/*/.work/*.receipt.json')) else nothing}\n"
    assert "Traceback" not in errors
    assert not (tmp_path / "run" / "capture").exists()
