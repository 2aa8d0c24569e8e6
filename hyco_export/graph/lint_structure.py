"""Lint checks of a QDQ graph's structure: versions, shapes, integer inputs and outputs, no float between Q and DQ."""

from collections.abc import Iterator
from typing import NamedTuple

import onnx
from onnx import TensorProto

from hyco_export.graph.index import INTEGER_TYPES, GraphIndex

PROVED_VERSIONS = {21: 10, 23: 11}  # opset -> IR version
RMS_NORM_OPSET = 23
QUANTISERS = frozenset({"QuantizeLinear", "DequantizeLinear"})


class Breach(NamedTuple):
    """One place that breaks a rule."""

    where: str
    what: str


def place(node: onnx.NodeProto) -> str:
    """A node's name, or else that of its first output."""
    return node.name or node.output[0]


def opset(model: onnx.ModelProto, index: GraphIndex) -> Iterator[Breach]:
    """Opset and IR version form a proved pair, and RMSNormalization has the opset that defines it."""
    version = next((entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx")), 0)
    if PROVED_VERSIONS.get(version) != model.ir_version:
        yield Breach("model", f"opset {version} with IR {model.ir_version}")
    for node in index.nodes:
        if node.op_type == "RMSNormalization" and version < RMS_NORM_OPSET:
            yield Breach(place(node), f"RMSNormalization in opset {version}")


def fixed_shape(model: onnx.ModelProto, index: GraphIndex) -> Iterator[Breach]:
    """Every dimension of every input and output is a number."""
    for name in (*index.inputs, *index.outputs):
        shape = index.shape(name)
        if shape is None or None in shape:
            yield Breach(name, f"shape {None if shape is None else list(shape)}")


def integer_io(model: onnx.ModelProto, index: GraphIndex) -> Iterator[Breach]:
    """Inputs and outputs are 8- or 16-bit integers, or int32 ids."""
    for name in (*index.inputs, *index.outputs):
        kind = index.element_type(name)
        if kind not in INTEGER_TYPES:
            yield Breach(name, f"{TensorProto.DataType.Name(kind)} at the graph's edge")


def float_island(model: onnx.ModelProto, index: GraphIndex) -> Iterator[Breach]:
    """Every float that an operator reads comes from DequantizeLinear, every float it writes goes to QuantizeLinear."""
    for node in index.nodes:
        if node.op_type in QUANTISERS:
            continue
        for name in node.input:
            if name and index.is_float(name) and index.made_by(name, "DequantizeLinear") is None:
                yield Breach(place(node), f"{node.op_type} reads float {name}")
        for name in node.output:
            readers = {reader.op_type for reader in index.consumers[name]}
            if name and index.is_float(name) and readers != {"QuantizeLinear"}:
                yield Breach(place(node), f"{node.op_type} writes float {name} to {sorted(readers) or 'nobody'}")


def trailing_dequantize(model: onnx.ModelProto, index: GraphIndex) -> Iterator[Breach]:
    """No DequantizeLinear makes a graph output or a tensor that nobody reads."""
    for node in index.nodes:
        if node.op_type == "DequantizeLinear" and (
            node.output[0] in index.outputs or not index.consumers[node.output[0]]
        ):
            yield Breach(place(node), f"DequantizeLinear after {node.input[0]} ends the graph")
