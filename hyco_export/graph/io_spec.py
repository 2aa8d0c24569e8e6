"""The I/O spec of a QDQ graph, read from the graph itself.

An input's encoding is that of the DequantizeLinear it feeds, an output's that of the QuantizeLinear it comes from;
plain integers (ids) have none.
"""

from collections.abc import Iterable

import numpy as np
import onnx
from onnx import numpy_helper

from hyco_export.core.device_spec import GraphSpec, TensorSpec
from hyco_export.core.encodings import Encoding
from hyco_export.errors import CompileError

# operators that keep their first input's encoding: it is searched beyond them (Concat keeps that of all its inputs)
LAYOUT_OPERATORS = frozenset({"Reshape", "Squeeze", "Unsqueeze", "Transpose", "Slice", "Gather", "Identity"})


def read_io_spec(model: onnx.ModelProto, name: str) -> GraphSpec:
    """Inputs and outputs of `model`, called `name`, in graph order.

    Raises:
        CompileError: a dimension is not fixed.
    """
    graph = model.graph
    constants = {init.name: init for init in graph.initializer}
    inputs = [value for value in graph.input if value.name not in constants]
    return GraphSpec(
        name=name,
        inputs=tuple(_spec(value, _encoding_after(value.name, graph, constants)) for value in inputs),
        outputs=tuple(_spec(value, _encoding_before(value.name, graph, constants)) for value in graph.output),
    )


def tensor_shape(value: onnx.ValueInfoProto) -> tuple[int, ...]:
    """The fixed shape of a graph input or output.

    Raises:
        CompileError: a dimension is symbolic or missing.
    """
    dims = value.type.tensor_type.shape.dim
    if not value.type.tensor_type.HasField("shape") or any(not dim.HasField("dim_value") for dim in dims):
        raise CompileError(f"{value.name} has no fixed shape", "an NPU graph is static: fix every dimension")
    return tuple(dim.dim_value for dim in dims)


def tensor_dtype(value: onnx.ValueInfoProto) -> str:
    """The numpy name of a graph input's or output's element type."""
    return onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type).name


def _spec(value: onnx.ValueInfoProto, encoding: Encoding | None) -> TensorSpec:
    return TensorSpec(value.name, tensor_shape(value), tensor_dtype(value), encoding)


Constants = dict[str, onnx.TensorProto]


def _encoding_after(tensor: str, graph: onnx.GraphProto, constants: Constants) -> Encoding | None:
    """The encoding with which `tensor` is read: that of the first DequantizeLinear after it."""
    for node in graph.node:
        if tensor not in node.input:
            continue
        if node.op_type == "DequantizeLinear" and node.input[0] == tensor:
            return _encoding(node, constants)
        if tensor in carried(node):
            found = _first(_encoding_after(output, graph, constants) for output in node.output)
            if found:
                return found
    return None


def _encoding_before(tensor: str, graph: onnx.GraphProto, constants: Constants) -> Encoding | None:
    """The encoding with which `tensor` was written: that of the last QuantizeLinear before it."""
    for node in graph.node:
        if tensor not in node.output:
            continue
        if node.op_type == "QuantizeLinear":
            return _encoding(node, constants)
        return _first(_encoding_before(source, graph, constants) for source in carried(node))
    return None


def carried(node: onnx.NodeProto) -> list[str]:
    """The inputs whose encoding a layout operator keeps, not its indices and shapes."""
    if node.op_type == "Concat":
        return list(node.input)
    return list(node.input[:1]) if node.op_type in LAYOUT_OPERATORS else []


def _first(encodings: Iterable[Encoding | None]) -> Encoding | None:
    return next((encoding for encoding in encodings if encoding is not None), None)


def _encoding(node: onnx.NodeProto, constants: Constants) -> Encoding | None:
    """The per-tensor encoding of a Q or DQ node; None when it is per channel or has no stored zero point."""
    if len(node.input) < 3 or any(name not in constants for name in node.input[1:]):
        return None
    scale, zero_point = (numpy_helper.to_array(constants[name]) for name in node.input[1:])
    if scale.size != 1:
        return None
    return Encoding(np.dtype(zero_point.dtype).name, float(scale.item()), int(zero_point.item()))  # type: ignore[arg-type]
