"""Worker processes: crashes become errors, noise goes to the log, ends are clean."""

import io
import signal
from pathlib import Path

import numpy as np
import pytest

from hyco_export.errors import CompileError
from hyco_export.graph import qnn_process
from hyco_export.graph.qnn_process import Compiled, ContextInfo, InspectJob, Outputs, RunJob, Worker


def scripted(tmp_path: Path, body: str) -> tuple[str, ...]:
    """A stand-in worker that runs `body` with one job read."""
    path = tmp_path / "stand_in.py"
    path.write_text(f"import os, signal, sys\nsys.stdin.buffer.read(8)\n{body}\n")
    return (str(path),)


def test_a_crash_names_the_signal_and_the_subject(tmp_path: Path) -> None:
    command = scripted(tmp_path, "os.kill(os.getpid(), signal.SIGSEGV)")
    with Worker(tmp_path / "w.log", command) as worker, pytest.raises(CompileError) as caught:
        worker.ask(InspectJob("bad.bin"), ContextInfo, subject="bad.bin")
    assert caught.value.message == "the compiler process ended with signal SIGSEGV while working on bad.bin"
    assert caught.value.hint == f"its last words are in {tmp_path / 'w.log'}"


def test_an_early_exit_names_the_code(tmp_path: Path) -> None:
    command = scripted(tmp_path, "sys.exit(3)")
    with Worker(None, command) as worker, pytest.raises(CompileError, match="exit code 3 while working on x"):
        worker.ask(InspectJob("x"), ContextInfo, subject="x")


def test_prints_of_the_worker_go_to_the_log_not_into_the_answer(tmp_path: Path) -> None:
    log = tmp_path / "deep" / "w.log"
    with Worker(log) as worker, pytest.raises(CompileError, match=r"x\.bin"):
        worker.ask(InspectJob(str(tmp_path / "x.bin")), ContextInfo, subject="x.bin")
    assert log.exists()


def test_a_failed_job_leaves_the_worker_alive(tmp_path: Path) -> None:
    with Worker(None) as worker:
        for _ in range(2):
            with pytest.raises(CompileError, match="no graph is open"):
                worker.ask(RunJob({}), Outputs, subject="x")


def test_an_interrupt_kills_the_worker(tmp_path: Path) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGALRM, interrupt)
    worker = Worker(None, scripted(tmp_path, "signal.pause()"))
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        with pytest.raises(KeyboardInterrupt):
            worker.ask(InspectJob("x"), ContextInfo, subject="x")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    assert worker._process.returncode == -signal.SIGKILL


def test_closing_twice_is_harmless() -> None:
    worker = Worker(None)
    worker.close()
    worker.close()
    assert worker._process.returncode is not None


@pytest.mark.parametrize("dtype", ["uint8", "int8", "uint16", "int32", "float32"])
def test_arrays_cross_the_pipe_unchanged(dtype: str) -> None:
    array = np.random.default_rng(0).integers(0, 100, (3, 1, 5)).astype(dtype)
    stream = io.BytesIO()
    qnn_process.write_message(stream, Outputs(qnn_process.pack_arrays({"a": array, "b": array[:0]})))
    stream.seek(0)
    reply = qnn_process.read_message(stream, Outputs)
    assert reply is not None
    found = qnn_process.unpack_arrays(reply.arrays)
    assert np.array_equal(found["a"], array) and found["a"].dtype == array.dtype
    assert found["b"].shape == (0, 1, 5)


def test_a_cut_stream_reads_as_the_end() -> None:
    stream = io.BytesIO()
    qnn_process.write_message(stream, Compiled(1.0, 1.0, 1))
    whole = stream.getvalue()
    for kept in (0, 4, len(whole) - 1):
        assert qnn_process.read_message(io.BytesIO(whole[:kept]), Compiled) is None
