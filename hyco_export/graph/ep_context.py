"""The small ONNX file beside a context binary: one EPContext node that names it, and what it was compiled for.

Knows ONNX Runtime's EPContext format; not the binary itself (`graph.context_binary`).
"""

from pathlib import Path

import msgspec
import onnx

from hyco_export.core.graphspec import TensorSpec
from hyco_export.errors import CompileError
from hyco_export.graph.interface import tensor_dtype, tensor_shape

PROVIDER = "QNNExecutionProvider"
COMPATIBILITY_KEY = f"ep_compatibility_info.{PROVIDER}"
COMPATIBILITY_VERSION = "v2"
COMPATIBILITY_FIELDS = 8  # version:backend:sdk:backend api:arch:soc model:vtcm MB:flags


class ContextModel(msgspec.Struct, frozen=True):
    """What an EPContext model says."""

    binary: str  # file name of the binary, beside the model
    graph: str  # the graph's name in the binary
    sdk_version: str
    htp_arch: int
    soc_model: int
    vtcm_mb: int
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]


def read_context_model(path: Path) -> ContextModel:
    """What the EPContext model at `path` says.

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
    nodes = list(model.graph.node)
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
