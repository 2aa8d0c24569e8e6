"""Which nodes of a refused graph the NPU cannot run: compiles once more, lets the provider talk, and listens."""

import contextlib
import tempfile
from pathlib import Path

import msgspec

from hyco_export.errors import CompileError
from hyco_export.graph import frames
from hyco_export.graph.qnn_errors import read_refusals
from hyco_export.graph.worker import Worker

FALLBACK_REFUSED = "the NPU cannot run all of"  # how qnn_errors words it
SHOWN_REFUSALS = 8  # operators named in an error message


def is_fallback(error: BaseException) -> bool:
    """Was a graph refused because parts of it would run on the CPU?"""
    return isinstance(error, CompileError) and FALLBACK_REFUSED in error.message


def named_fallback(job: frames.CompileJob, name: str, log: Path) -> CompileError:
    """The error that says which nodes of the graph `name` the NPU cannot run."""
    trial_log = log.with_name(f"{log.stem}.fallback.log")
    with tempfile.TemporaryDirectory() as folder, Worker(trial_log) as worker:
        place = str(Path(folder) / "trial_ctx.onnx")
        trial = msgspec.structs.replace(job, context_model=place, explain_fallback=True, two_bit=None)
        with contextlib.suppress(CompileError):  # what was refused is in the log all the same
            worker.ask(trial, frames.Compiled, name)
    refusals = read_refusals(trial_log.read_text(encoding="utf-8", errors="replace"))
    shown = "; ".join(refusals[:SHOWN_REFUSALS]) + ("; ..." if len(refusals) > SHOWN_REFUSALS else "")
    return CompileError(
        f"the NPU cannot run all of {name}: {len(refusals)} operator(s) would fall back to the CPU: {shown}",
        f"change these operators or their widths; the provider's words are in {trial_log}",
    )
