"""Checks that a compiled context is what was asked for: EPContext model, binary and the QDQ graph's I/O spec agree.

An EPContext model is the small ONNX file beside a context binary: one EPContext node that names the binary, and what it
was compiled for (`read_context_model`). `graph.context_binary` reads the binary.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np
import onnx

from hyco_export.core.device_spec import GraphSpec, TensorSpec
from hyco_export.core.targets import Target
from hyco_export.errors import CompileError
from hyco_export.graph.context_binary import parse_context, read_context
from hyco_export.graph.io_spec import tensor_dtype, tensor_shape
from hyco_export.graph.qnn_process import ContextInfo

PROVIDER = "QNNExecutionProvider"
COMPATIBILITY_KEY = f"ep_compatibility_info.{PROVIDER}"
COMPATIBILITY_VERSION = "v2"
COMPATIBILITY_FIELDS = 8  # version:backend:sdk:backend api:arch:soc model:vtcm MB:flags
HTP_BACKEND = 6
WRONG_OPTIMISATION_LEVEL = 1  # 0.9 dB on a realistic head where 0, 2 and 3 gave 49.5 dB
SCALE_TOLERANCE = 1e-6  # relative: the binary keeps float32


class ContextModel(msgspec.Struct, frozen=True):
    """The contents of an EPContext model."""

    binary: str  # file name of the binary, beside the model
    graph: str  # the graph's name in the binary
    sdk_version: str
    htp_arch: int
    soc_model: int
    vtcm_mb: int
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]


def read_context_model(path: Path) -> ContextModel:
    """Read the EPContext model at `path`.

    Raises:
        CompileError: no such file, not exactly one EPContext node, or no readable target.
    """
    if not path.is_file():
        raise CompileError(f"context model {path} does not exist", "compile it: hyco-export compile")
    try:
        model = onnx.load(path, load_external_data=False)
    except Exception as error:
        raise CompileError(f"{path} is not an ONNX model", "compile it again: hyco-export compile") from error
    attributes = {a.name: onnx.helper.get_attribute_value(a) for a in _only_node(model, path).attribute}
    if attributes.get("embed_mode") != 0:
        raise CompileError(f"{path.name} holds its binary inside", "compile it again: hyco-export compile")
    htp_arch, soc_model, vtcm_mb = _target_numbers(model, path)
    return ContextModel(
        binary=attributes["ep_cache_context"].decode(),
        graph=attributes["partition_name"].decode(),
        sdk_version=attributes["ep_sdk_version"].decode(),
        htp_arch=htp_arch,
        soc_model=soc_model,
        vtcm_mb=vtcm_mb,
        inputs=tuple(TensorSpec(v.name, tensor_shape(v), tensor_dtype(v)) for v in model.graph.input),
        outputs=tuple(TensorSpec(v.name, tensor_shape(v), tensor_dtype(v)) for v in model.graph.output),
    )


def _only_node(model: onnx.ModelProto, path: Path) -> onnx.NodeProto:
    nodes: list[onnx.NodeProto] = list(model.graph.node)
    if [node.op_type for node in nodes] != ["EPContext"]:
        found = ", ".join(f"{node.op_type} {node.name}".rstrip() for node in nodes) or "nothing"
        raise CompileError(
            f"{path.name} must hold one EPContext node and nothing else, it holds: {found}",
            "a graph that is split between NPU and CPU is not an artifact: change what falls back",
        )
    return nodes[0]


def _target_numbers(model: onnx.ModelProto, path: Path) -> tuple[int, int, int]:
    properties = {prop.key: prop.value for prop in model.metadata_props}
    fields = properties.get(COMPATIBILITY_KEY, "").split(":")
    if fields[0] != COMPATIBILITY_VERSION or len(fields) != COMPATIBILITY_FIELDS:
        raise CompileError(
            f"{path.name} does not say its target ({COMPATIBILITY_KEY} is {':'.join(fields)!r})",
            "compile it again with the onnxruntime-qnn version of constraints.txt",
        )
    htp_arch, soc_model, vtcm_mb = (int(field) for field in fields[4:7])
    return htp_arch, soc_model, vtcm_mb


def check_context(
    context_models: Sequence[Path], specs: Sequence[GraphSpec], target: Target
) -> tuple[Path, ContextInfo]:
    """The one binary of these `context_models`, with a graph of `specs` for each, and its description, both checked.

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
    """Check a binary alone, without knowing what it was compiled from.

    Raises:
        CompileError: it is not for HTP, holds no graph, or one that was finalised at level 1.
    """
    _require_none(_graph_problems(info), subject)


def require_target(context_model: Path, target: Target, system_library: Path) -> None:
    """Check that a context was compiled for `target`: the NPU's libraries also open binaries of other chips.

    Runs in this process. An unreadable binary passes: opening it reports what is wrong.

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
        yield from _io_spec_problems(graphs[model.graph], spec)
    else:
        yield f"graph {model.graph} is not in the binary"


def require_io_spec(found: GraphSpec, wanted: GraphSpec, subject: str) -> None:
    """Check that a graph has the inputs and outputs of `wanted`; `subject` names it in the message.

    Raises:
        CompileError: the first input or output that differs.
    """
    for problem in _io_spec_problems(found, wanted, (subject, "its JSON")):
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


def _io_spec_problems(
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
                has = _described(by_name[tensor.name])
                yield f"{kind} {tensor.name} is {has} in {here}, {_described(tensor)} in {there}"


def _described(tensor: TensorSpec) -> str:
    encoding = tensor.encoding
    parameters = f"scale {encoding.scale:.6g} zero point {encoding.zero_point}" if encoding else "no encoding"
    return f"{tensor.dtype} {list(tensor.shape)} {parameters}"


def _same_tensor(found: TensorSpec, wanted: TensorSpec) -> bool:
    """Whether dtype, shape and encoding are the same; any encoding passes where `wanted` has none."""
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
    """Check that feeds are exactly the graph's inputs.

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
