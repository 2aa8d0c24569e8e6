"""Several graphs in one context binary that stores the weights they have in common once.

Such a binary is what a phone gets; x86 cannot load it (the emulator refuses it or crashes), so its graphs are proved in
binaries of their own. Here only what it says of itself is checked. Knows the order: all graphs in one process.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import onnx

from hyco_export.core.graphspec import GraphSpec
from hyco_export.core.targets import Target
from hyco_export.errors import CompileError
from hyco_export.graph import frames
from hyco_export.graph.context_check import check_shared
from hyco_export.graph.frames import ContextInfo
from hyco_export.graph.interface import read_interface
from hyco_export.graph.worker import Worker

SUFFIX = "shared"


@dataclass(frozen=True)
class SharedContext:
    """Several compiled graphs in one binary and what it took."""

    context_models: tuple[Path, ...]  # <graph>_shared_ctx.onnx, in the order given; all name the one binary
    binary: Path
    info: ContextInfo
    wall_s: float
    peak_rss_bytes: int
    binary_bytes: int


def compile_shared(
    models: Sequence[Path],
    out_dir: Path,
    names: Sequence[str],
    target: Target,
    log: Path,
    two_bit: frames.TwoBit | None = None,
) -> SharedContext:
    """Compile the QDQ graphs `models`, called `names`, into one binary in `out_dir`, named after the first.

    Raises:
        CompileError: the compiler refused a graph, crashed, or made something else than was asked for.
    """
    specs = [_interface(model, name) for model, name in zip(models, names, strict=True)]
    context_models = tuple(out_dir / f"{name}_{SUFFIX}_ctx.onnx" for name in names)
    job = frames.SharedCompileJob(
        models=tuple(str(model.resolve()) for model in models),
        context_models=tuple(str(path.resolve()) for path in context_models),
        target=target,
        two_bit=two_bit,
    )
    try:
        with Worker(log) as worker:
            cost = worker.ask(job, frames.Compiled, subject=" and ".join(names))
        binary, info = check_shared(context_models, specs, target)
    except BaseException:
        for path in out_dir.glob(f"*_{SUFFIX}_ctx*"):
            path.unlink()
        raise
    return SharedContext(
        context_models, binary, info, cost.wall_s, cost.peak_rss_bytes, binary_bytes=binary.stat().st_size
    )


def _interface(model: Path, name: str) -> GraphSpec:
    if not model.is_file():
        raise CompileError(f"{model} does not exist", "build the stage before this one: hyco-export run")
    return read_interface(onnx.load(model, load_external_data=False), name)
