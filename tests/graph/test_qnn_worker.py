"""The worker process by its pipes: faults become replies, it goes on after them, and ends with its input."""

import subprocess
import sys
from pathlib import Path

import numpy as np

from hyco_export.graph import qnn_process
from hyco_export.graph.qnn_process import Failed, InspectJob, RunJob, read_message, write_message

WAIT_S = 120


def test_faults_are_answered_and_a_closed_input_ends_it(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hyco_export.graph.qnn_worker"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as worker:
        assert worker.stdin is not None and worker.stdout is not None
        replies = []
        for job in (RunJob(qnn_process.pack_arrays({"x": np.zeros(2)})), InspectJob(str(tmp_path / "gone.bin"))):
            write_message(worker.stdin, job)
            replies.append(read_message(worker.stdout, Failed))
        worker.stdin.close()
        assert worker.wait(WAIT_S) == 0
    assert replies[0] == Failed("no graph is open", "")
    assert replies[1] is not None and "gone.bin" in replies[1].error
