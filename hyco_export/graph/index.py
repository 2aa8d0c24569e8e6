"""Look-ups in an ONNX graph: a tensor's producer and consumers, type and shape, quantisation parameters."""

from collections import defaultdict
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper
from onnx.external_data_helper import uses_external_data

from hyco_export.errors import CompileError

SHAPE_DATA_LIMIT = 1024  # elements: shapes, axes and bounds, which inference reads, are far smaller
FLOATS = frozenset({TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.DOUBLE})
INTEGER_TYPES = frozenset(
    {TensorProto.UINT8, TensorProto.INT8, TensorProto.UINT16, TensorProto.INT16, TensorProto.INT32}
)


class GraphIndex:
    """Read-only view of a model's main graph.

    Args:
        model: a model without subgraphs; tensors that inference cannot type have type 0.
        folder: where the model's external data lies; scales and zero points may be in there.
    """

    def __init__(self, model: onnx.ModelProto, folder: Path | None = None) -> None:
        graph = model.graph
        self._folder = folder
        self.nodes = list(graph.node)
        self.outputs = [value.name for value in graph.output]
        self.constants = {init.name: init for init in graph.initializer}
        self.inputs = [value.name for value in graph.input if value.name not in self.constants]
        self.producer = {name: node for node in self.nodes for name in node.output if name}
        self.consumers: dict[str, list[onnx.NodeProto]] = defaultdict(list)
        for node in self.nodes:
            for name in node.input:
                if name:
                    self.consumers[name].append(node)
        inferred = onnx.shape_inference.infer_shapes(_without_large_data(model), data_prop=True).graph
        values = (*graph.input, *graph.output, *inferred.value_info)
        self._types = {value.name: value.type.tensor_type for value in values}

    def element_type(self, name: str) -> int:
        """TensorProto's number for a tensor's element type; 0 when unknown."""
        if name in self.constants:
            return int(self.constants[name].data_type)
        return int(self._types[name].elem_type) if name in self._types else 0

    def is_float(self, name: str) -> bool:
        return self.element_type(name) in FLOATS

    def shape(self, name: str) -> tuple[int | None, ...] | None:
        """Dimensions, None where one is not fixed; None for an unknown rank."""
        if name in self.constants:
            return tuple(self.constants[name].dims)
        kind = self._types.get(name)
        if kind is None or not kind.HasField("shape"):
            return None
        return tuple(dim.dim_value if dim.HasField("dim_value") else None for dim in kind.shape.dim)

    def made_by(self, name: str, operator: str) -> onnx.NodeProto | None:
        """The node that makes `name`, if it is an `operator`."""
        node = self.producer.get(name)
        return node if node is not None and node.op_type == operator else None

    def stored(self, real: str) -> str | None:
        """The integer tensor that a dequantised tensor is read from."""
        node = self.made_by(real, "DequantizeLinear")
        return node.input[0] if node is not None else None

    def origin(self, name: str, through: frozenset[str]) -> str:
        """Follow a tensor back through Q, DQ and the operators `through` to where it was computed or stored."""
        node = self.producer.get(name)
        while node is not None and node.op_type in through | {"QuantizeLinear", "DequantizeLinear"}:
            name = node.input[0]
            node = self.producer.get(name)
        return name

    def values(self, constant: str) -> np.ndarray:
        """A constant's values, sub-byte ones unpacked.

        Raises:
            CompileError: they lie in another file and no folder was given.
        """
        tensor = self.constants[constant]
        if uses_external_data(tensor) and self._folder is None:
            raise CompileError(f"{constant} lies outside the model file", "say in which folder")
        return numpy_helper.to_array(tensor, str(self._folder or ""))

    def zero_points(self, node: onnx.NodeProto) -> np.ndarray | None:
        """Zero points of a Q or DQ node, int4 unpacked; None where none are stored."""
        if len(node.input) < 3 or node.input[2] not in self.constants:
            return None
        return self.values(node.input[2]).astype(np.int64)

    def parameters(self, node: onnx.NodeProto) -> tuple[np.ndarray, np.ndarray] | None:
        """Scales and zero points of a Q or DQ node, int4 unpacked; None unless both are stored."""
        if len(node.input) < 3 or any(name not in self.constants for name in node.input[1:3]):
            return None
        scale, zero_point = (self.values(name) for name in node.input[1:3])
        return scale.astype(np.float64), zero_point.astype(np.int64)

    def range(self, node: onnx.NodeProto) -> tuple[float, float] | None:
        """Least and greatest real value of a Q or DQ node; None for per-channel and sub-byte quantisation."""
        found = self.parameters(node)
        if found is None or found[0].size != 1 or self.element_type(node.input[2]) not in INTEGER_TYPES:
            return None
        limits = np.iinfo(onnx.helper.tensor_dtype_to_np_dtype(self.element_type(node.input[2])))
        scale, zero_point = found[0].item(), found[1].item()
        return (limits.min - zero_point) * scale, (limits.max - zero_point) * scale


def attribute(node: onnx.NodeProto, name: str, default: int) -> int:
    """An integer attribute."""
    return next((a.i for a in node.attribute if a.name == name), default)


def _without_large_data(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with large constants as inputs: shape inference needs their types, not gigabytes of values."""
    light = onnx.ModelProto()
    light.CopyFrom(_header(model))
    light.graph.node.extend(model.graph.node)
    light.graph.input.extend(model.graph.input)
    light.graph.output.extend(model.graph.output)
    for init in model.graph.initializer:
        if int(np.prod(init.dims)) <= SHAPE_DATA_LIMIT:
            light.graph.initializer.append(init)
        else:
            light.graph.input.append(onnx.helper.make_tensor_value_info(init.name, init.data_type, init.dims))
    return light


def _header(model: onnx.ModelProto) -> onnx.ModelProto:
    header = onnx.ModelProto(ir_version=model.ir_version)
    header.opset_import.extend(model.opset_import)
    header.graph.name = model.graph.name
    return header
