"""What `serve` hands to the processes that serve: values that pickle, whoever made them."""

import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import trustme

from hyco_export.cli.serve import ListenOptions, serve_run
from hyco_export.device.client import HttpTransport
from hyco_export.server.admission import ServeOptions

TOKEN = "replicas-0123456789abcdef"


@pytest.mark.parametrize("secure", [False, True])
def test_what_replicas_are_built_from_travels_to_their_processes(
    secure: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cloudpickle = pytest.importorskip("ray.cloudpickle")
    certificate = key = token_file = None
    if secure:
        leaf = trustme.CA().issue_cert("127.0.0.1")
        certificate, key, token_file = tmp_path / "cert.pem", tmp_path / "key.pem", tmp_path / "tokens"
        leaf.private_key_pem.write_to_path(key)
        leaf.cert_chain_pems[0].write_to_path(certificate)
        token_file.write_text(TOKEN + "\n")
        token_file.chmod(0o600)
    handed: list[Any] = []
    monkeypatch.setattr("hyco_export.cli.application.serve_replicas", lambda *arguments: handed.extend(arguments))
    listen = ListenOptions("127.0.0.1", 0, certificate, key, token_file, False, 0)
    serve_run(None, None, listen, "cpu", None, ServeOptions(), 2)
    build, replicas = handed[:2]
    received = cloudpickle.loads(cloudpickle.dumps(build))
    assert replicas == 2 and received.args[0].options.servers == 2  # each takes its share of the memory
    assert received.args[0].listen == listen and len(received.args[0].tokens) == secure


@pytest.mark.slow
def test_replicas_serve_by_the_command(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    command = [sys.executable, "-m", "hyco_export", "serve", "--replicas", "2", "--threads", "1", "--port", "0"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, **pipes, text=True, cwd=tmp_path) as process:  # where nothing is built
        assert process.stdout is not None
        lines = []
        try:
            while not (lines and lines[-1].startswith("serving on")):
                line = process.stdout.readline()
                assert line, process.communicate()[1]
                lines.append(line)
            url = re.search(r"http://\S+", lines[-1])
            assert url is not None
            assert HttpTransport(url.group()).info().version == 1
        finally:
            process.send_signal(signal.SIGTERM)
        said, errors = process.communicate(timeout=60)
    assert sum(line.startswith("sessions:") for line in lines) == 1  # one replica's start lines
    assert said == "stopped: sessions are gone\n" and process.returncode == 0
    assert "Token authentication" not in errors and "retries" not in errors
