"""Is a compiled context what was asked for? Compares the EPContext model, the binary and the QDQ graph's interface.

Knows the rules; reading is done by `graph.ep_context` and `graph.context_binary`.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from hyco_export.core.graphspec import GraphSpec, TensorSpec
from hyco_export.core.targets import Target
from hyco_export.errors import CompileError
from hyco_export.graph.context_binary import parse_context, read_context
from hyco_export.graph.ep_context import ContextModel, read_context_model
from hyco_export.graph.frames import ContextInfo

HTP_BACKEND = 6
WRONG_OPTIMISATION_LEVEL = 1  # 0.9 dB on a realistic head where 0, 2 and 3 gave 49.5 dB
SCALE_TOLERANCE = 1e-6  # relative: the binary keeps float32


def check_context(context_model: Path, spec: GraphSpec, target: Target) -> tuple[Path, ContextInfo]:
    """The binary beside `context_model` and what it says, after both were compared with `spec` and `target`.

    Raises:
        CompileError: the first thing that differs.
    """
    return check_shared([context_model], [spec], target)


def check_shared(
    context_models: Sequence[Path], specs: Sequence[GraphSpec], target: Target
) -> tuple[Path, ContextInfo]:
    """The same for the one binary of several `context_models`, which holds one graph of `specs` for each.

    Raises:
        CompileError: the first thing that differs.
    """
    models = [read_context_model(path) for path in context_models]
    binary = context_models[0].with_name(models[0].binary)
    info = read_context(binary)
    _require_none(_number_problems(info, len(specs)), context_models[0].name)
    for path, model, spec in zip(context_models, models, specs, strict=True):
        _require_none(_target_problems(model, info, target), path.name)
        _require_none(_graph_problems(info), path.name)
        _require_none(_membership_problems(model, info, binary, spec), path.name)
    return binary, info


def require_sound(info: ContextInfo, subject: str) -> None:
    """What can be said of a binary alone, without knowing what it was compiled from.

    Raises:
        CompileError: it is not for HTP, holds no graph, or one that was finalised at level 1.
    """
    _require_none(_graph_problems(info), subject)


def require_target(context_model: Path, target: Target, system_library: Path) -> None:
    """The pair is for `target`: the NPU's libraries open binaries of older chips, and some of others, all the same.

    In this process. A binary that cannot be read is passed over: who opens it says what is wrong with it.

    Raises:
        CompileError: it is for another target; names both.
    """
    model = read_context_model(context_model)
    try:
        info = parse_context(context_model.with_name(model.binary), system_library)
    except (CompileError, OSError, ValueError):  # ValueError: an empty file cannot be mapped
        return
    for problem in _target_problems(model, info, target):
        raise CompileError(
            f"{context_model.name}: {problem}",
            f"give the --target that it was compiled for, or compile it: hyco-export compile --target {target.name}",
        )


def _require_none(problems: Iterator[str], subject: str) -> None:
    for problem in problems:
        raise CompileError(f"{subject}: {problem}", "do not ship it; compile it again")


def _number_problems(info: ContextInfo, wanted: int) -> Iterator[str]:
    if len(info.graphs) != wanted:
        yield f"{len(info.graphs)} graphs in the binary instead of {wanted}"


def _membership_problems(model: ContextModel, info: ContextInfo, binary: Path, spec: GraphSpec) -> Iterator[str]:
    if model.binary != binary.name:
        yield f"it names {model.binary}, the others {binary.name}"
    graphs = {graph.spec.name: graph.spec for graph in info.graphs}
    if model.graph in graphs:
        yield from _interface_problems(graphs[model.graph], spec)
    else:
        yield f"graph {model.graph} is not in the binary"


def require_interface(found: GraphSpec, wanted: GraphSpec, subject: str) -> None:
    """A graph must take and give what `wanted` promises; `subject` is what the message calls it.

    Raises:
        CompileError: the first input or output that differs.
    """
    for problem in _interface_problems(found, wanted, (subject, "its JSON")):
        raise CompileError(f"{subject} is not the graph that its JSON describes: {problem}", "build both again")


def _target_problems(model: ContextModel, info: ContextInfo, target: Target) -> Iterator[str]:
    wanted = (target.htp_arch, target.soc_model)
    if (model.htp_arch, model.soc_model) != wanted:
        yield f"compiled for v{model.htp_arch}/SoC {model.soc_model}, asked for v{wanted[0]}/SoC {wanted[1]}"
    if (info.htp_arch, info.soc_model) != wanted:
        yield f"the binary is for v{info.htp_arch}/SoC {info.soc_model}, asked for v{wanted[0]}/SoC {wanted[1]}"
    if info.soc is not None and info.soc != target.soc:
        yield f"the compiler's note in the binary says {info.soc}, asked for {target.soc}"
    if model.vtcm_mb != target.vtcm_mb:
        yield f"compiled for {model.vtcm_mb} MB of VTCM, asked for {target.vtcm_mb}"


def _graph_problems(info: ContextInfo) -> Iterator[str]:
    if info.backend_id != HTP_BACKEND:
        yield f"backend {info.backend_id} instead of HTP ({HTP_BACKEND})"
    if not info.graphs:
        yield "no graph in the binary"
    for graph in info.graphs:
        if graph.optimisation_level == WRONG_OPTIMISATION_LEVEL:
            yield "finalised at optimisation level 1, which loses accuracy silently"


def _interface_problems(
    found: GraphSpec, wanted: GraphSpec, sides: tuple[str, str] = ("the binary", "the graph")
) -> Iterator[str]:
    here, there = sides
    for kind, have, want in (("input", found.inputs, wanted.inputs), ("output", found.outputs, wanted.outputs)):
        by_name = {tensor.name: tensor for tensor in have}
        names = {tensor.name for tensor in want}
        if names != set(by_name):
            yield f"{kind}s {sorted(by_name)} in {here}, {sorted(names)} in {there}"
        for tensor in want:
            if tensor.name in by_name and not _same_tensor(by_name[tensor.name], tensor):
                told = _told(by_name[tensor.name])
                yield f"{kind} {tensor.name} is {told} in {here}, {_told(tensor)} in {there}"


def _told(tensor: TensorSpec) -> str:
    grid = tensor.encoding
    said = f"scale {grid.scale:.6g} zero point {grid.zero_point}" if grid else "no grid"
    return f"{tensor.dtype} {list(tensor.shape)} {said}"


def _same_tensor(found: TensorSpec, wanted: TensorSpec) -> bool:
    """Same dtype, shape and grid; where the graph gives no grid, the binary's is its own business."""
    if (found.dtype, found.shape) != (wanted.dtype, wanted.shape):
        return False
    if wanted.encoding is None:
        return True
    return (
        found.encoding is not None
        and math.isclose(found.encoding.scale, wanted.encoding.scale, rel_tol=SCALE_TOLERANCE)
        and found.encoding.zero_point == wanted.encoding.zero_point
    )


def require_feeds(feeds: Mapping[str, np.ndarray], inputs: Sequence[TensorSpec], name: str) -> None:
    """Feeds must be exactly the graph's inputs.

    Raises:
        CompileError: the first input that is missing, unknown or of another shape or dtype.
    """
    unknown = sorted(set(feeds) - {tensor.name for tensor in inputs})
    if unknown:
        raise CompileError(f"{name} has no input {unknown[0]}", f"its inputs: {', '.join(t.name for t in inputs)}")
    for tensor in inputs:
        if tensor.name not in feeds:
            raise CompileError(f"{name} needs input {tensor.name}", f"{tensor.dtype} {list(tensor.shape)}")
        value = feeds[tensor.name]
        if (value.dtype.name, value.shape) != (tensor.dtype, tensor.shape):
            raise CompileError(
                f"{name} takes {tensor.name} as {tensor.dtype} {list(tensor.shape)}, "
                f"got {value.dtype.name} {list(value.shape)}",
                "feed the integers themselves, in the graph's shape",
            )
