"""The worker process: answers jobs on stdin with replies on the original stdout, until stdin closes.

Run as `python -m hyco_export.graph.qnn_worker` by `graph.qnn_process`. Anything else that is printed, by Python or
by the vendor's libraries at file-descriptor level, goes to stderr, which the parent points at a log file.
"""

import os
import queue
import resource
import sys
import threading
import time
from pathlib import Path
from typing import BinaryIO, cast

from hyco_export.core.memory import BYTES_PER_KB, own_peak_bytes
from hyco_export.errors import HycoError
from hyco_export.graph import qnn_process
from hyco_export.graph.context_binary import parse_context
from hyco_export.graph.context_check import require_target
from hyco_export.graph.qnn import VendorSession, compile_here, compile_shared_here, system_library
from hyco_export.graph.qnn_process import (
    CompileJob,
    Failed,
    Job,
    OpenJob,
    Reply,
    RunJob,
    SharedCompileJob,
    read_message,
    write_message,
)


def main() -> None:
    """Answer jobs one after the other."""
    replies = claim_stdout()
    jobs = follow_jobs(sys.stdin.buffer)
    session: VendorSession | None = None
    while True:
        job = jobs.get()
        reply: Reply
        try:
            if isinstance(job, OpenJob):
                require_target(Path(job.context_model), job.target, system_library())
                session = VendorSession(Path(job.context_model), job.target)
                reply = qnn_process.Opened(session.inputs, session.outputs)
            elif isinstance(job, RunJob):
                reply = run(session, job)
            elif isinstance(job, CompileJob | SharedCompileJob):
                reply = compile_measured(job)
            else:
                reply = parse_context(Path(job.binary), system_library())
        except Exception as error:  # the parent turns it into a typed error
            if isinstance(error, HycoError):
                reply = Failed(error.message, error.hint)
            else:
                reply = Failed(f"{type(error).__name__}: {error}")
        write_message(replies, reply)


def claim_stdout() -> BinaryIO:
    """The original stdout for replies; whatever prints to stdout from now on lands in stderr."""
    sys.stdout.flush()
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    return replies


def follow_jobs(stream: BinaryIO) -> queue.SimpleQueue[Job]:
    """Read jobs in a thread, so that a closed input (the parent has ended or is done) ends even a busy worker."""
    jobs: queue.SimpleQueue[Job] = queue.SimpleQueue()

    def follow() -> None:
        while (job := read_message(stream, cast(type[Job], Job))) is not None:
            jobs.put(job)
        os._exit(0)  # no clean-up: the vendor's own may hang or crash

    threading.Thread(target=follow, daemon=True).start()
    return jobs


def compile_measured(job: CompileJob | SharedCompileJob) -> qnn_process.Compiled:
    """Compile, and measure what it cost."""
    start_s, start_cpu_s = time.perf_counter(), time.process_time()
    narrowed = compile_here(job) if isinstance(job, CompileJob) else compile_shared_here(job)
    return qnn_process.Compiled(
        wall_s=time.perf_counter() - start_s,
        cpu_s=time.process_time() - start_cpu_s,
        peak_rss_bytes=peak_rss_bytes(),
        two_bit_weights=narrowed,
    )


def peak_rss_bytes() -> int:
    """This process's largest resident size.

    From /proc where it exists: getrusage also counts the parent whose memory the process shared before exec.
    """
    return own_peak_bytes() or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * BYTES_PER_KB


def run(session: VendorSession | None, job: RunJob) -> qnn_process.Outputs:
    """One run of the open graph."""
    if session is None:
        raise HycoError("no graph is open")
    return qnn_process.Outputs(qnn_process.pack_arrays(session.run(qnn_process.unpack_arrays(job.feeds))))


if __name__ == "__main__":
    main()
