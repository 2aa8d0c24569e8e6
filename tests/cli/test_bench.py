"""`bench` from the command line."""

import pytest

from hyco_export.cli import bench, invocation
from hyco_export.cli.connection import ConnectOptions
from hyco_export.stages.run_folder import RunFolder
from tests.cli.test_app import refused


def test_an_interrupted_bench_counts_what_is_there_before_its_server_is(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "open_run", lambda *_: run)
    monkeypatch.setattr(bench, "server_process", _interrupted)
    monkeypatch.setattr(bench, "kept_generations", lambda folder: f"2 generations in {folder}")
    for out in (None, run.root / "elsewhere"):
        options = bench.BenchOptions(("cloud-mtp", "hyco"), "onnx-cpu", None, 1, None, out)
        with pytest.raises(KeyboardInterrupt) as stop:
            bench.bench_run(None, None, None, None, options, ConnectOptions())
        assert invocation.told(stop.value) == (
            f"interrupted; kept: 2 generations in {out or run.root / 'bench'}; the same command goes on from there"
        )


def _interrupted(*_: object) -> None:
    raise KeyboardInterrupt


def test_a_device_for_a_server_that_runs_already_is_refused() -> None:
    message = " ".join(refused("bench", "--server", "http://127.0.0.1:9", "--device", "cuda").split())
    assert "--device cuda: the server at http://127.0.0.1:9 runs already" in message
    assert "next: leave it out, or start that server with it" in message
