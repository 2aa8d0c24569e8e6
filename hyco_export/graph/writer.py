"""An ONNX graph under construction in which every tensor between two nodes is an integer tensor with one encoding.

Knows node units: DequantizeLinear (one per use) -> node -> QuantizeLinear. Knows no operation's meaning.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from hyco_export.core.encodings import Encoding, encoding_from_range
from hyco_export.core.graphspec import TensorSpec
from hyco_export.graph.initializers import integer_tensor

OPSET = 23  # the first with RMSNormalization
IR_VERSION = 11  # of opset 23
ONNX_TYPES = {
    "uint8": TensorProto.UINT8,
    "int8": TensorProto.INT8,
    "uint16": TensorProto.UINT16,
    "int16": TensorProto.INT16,
    "int32": TensorProto.INT32,
}


@dataclass(frozen=True)
class GraphTensor:
    """An integer tensor of the graph; `encoding` is None for indices (int32)."""

    name: str
    shape: tuple[int, ...]
    encoding: Encoding | None

    @property
    def dtype(self) -> str:
        return self.encoding.dtype if self.encoding else "int32"

    def spec(self) -> TensorSpec:
        return TensorSpec(self.name, self.shape, self.dtype, self.encoding)

    def value_info(self) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(self.name, ONNX_TYPES[self.dtype], self.shape)


class GraphWriter:
    """Collects nodes and initializers; an initializer written twice under one name is stored once."""

    def __init__(self) -> None:
        self._nodes: list[onnx.NodeProto] = []
        self._initializers: dict[str, onnx.TensorProto] = {}
        self._made: set[str] = set()
        self._views = 0

    def model(self, name: str, inputs: Sequence[GraphTensor], outputs: Sequence[GraphTensor]) -> onnx.ModelProto:
        graph = helper.make_graph(
            self._nodes,
            name,
            [tensor.value_info() for tensor in inputs],
            [tensor.value_info() for tensor in outputs],
            list(self._initializers.values()),
        )
        opset = [helper.make_opsetid("", OPSET)]
        return helper.make_model(graph, opset_imports=opset, ir_version=IR_VERSION, producer_name="hyco-export")

    def view(self, of: str) -> str:
        """A fresh name for a tensor inside a node unit."""
        self._views += 1
        return f"{of}/{self._views}"

    def node(self, kind: str, inputs: Sequence[str], output: str, **attributes: Any) -> None:
        """One node with one output.

        Raises:
            ValueError: a tensor of that name exists.
        """
        if output in self._made or output in self._initializers:
            raise ValueError(f"two tensors are called {output}")
        self._made.add(output)
        self._nodes.append(helper.make_node(kind, list(inputs), [output], name=f"{output}.{kind}", **attributes))

    def has(self, name: str) -> bool:
        """Is there an initializer of this name?"""
        return name in self._initializers

    def length(self, name: str) -> int:
        """First dimension of an initializer."""
        return int(self._initializers[name].dims[0])

    def initialize(self, tensor: onnx.TensorProto) -> str:
        """Store a constant, or find it stored: its name.

        Raises:
            ValueError: another tensor has that name.
        """
        if tensor.name in self._made or self._initializers.setdefault(tensor.name, tensor) != tensor:
            raise ValueError(f"two tensors are called {tensor.name}")
        return tensor.name

    def constant(self, name: str, values: np.ndarray) -> str:
        """A plain constant: shapes, bounds, scales."""
        return self.initialize(numpy_helper.from_array(np.asarray(values), name))

    def ints(self, *values: int) -> str:
        """An int64 vector constant: axes, bounds, shapes."""
        return self.constant(f"ints.{'_'.join(map(str, values))}", np.array(values, np.int64))

    def real(self, tensor: GraphTensor) -> str:
        """A dequantised view for one use; indices are read as they are."""
        if tensor.encoding is None:
            return tensor.name
        view = self.view(tensor.name)
        self.node("DequantizeLinear", [tensor.name, *self._grid(tensor.name, tensor.encoding)], view)
        return view

    def quantize(self, view: str, name: str, shape: tuple[int, ...], encoding: Encoding) -> GraphTensor:
        """A real view written on its grid under `name`."""
        self.node("QuantizeLinear", [view, *self._grid(name, encoding)], name)
        return GraphTensor(name, shape, encoding)

    def emit(
        self,
        kind: str,
        name: str,
        inputs: Sequence[GraphTensor | str],
        shape: tuple[int, ...],
        encoding: Encoding | None,
        **attributes: Any,
    ) -> GraphTensor:
        """One node unit: tensors are read through real views, plain names as they are; the result is on `encoding`."""
        names = [self.real(part) if isinstance(part, GraphTensor) else part for part in inputs]
        if encoding is None:
            self.node(kind, names, name, **attributes)
            return GraphTensor(name, shape, None)
        view = self.view(name)
        self.node(kind, names, view, **attributes)
        return self.quantize(view, name, shape, encoding)

    def vector(self, name: str, values: np.ndarray) -> GraphTensor:
        """A float constant on a 16-bit grid of its own (norm scales: 83-85 dB; as a float island 71 dB)."""
        return self._stored(name, values, encoding_from_range(values.min(), values.max(), "uint16"))

    def scalar(self, name: str, value: float) -> GraphTensor:
        """A positive constant, the top of a grid of its own."""
        return self._stored(name, np.array(value, np.float32), encoding_from_range(0.0, value, "uint16"))

    def _stored(self, name: str, values: np.ndarray, encoding: Encoding) -> GraphTensor:
        self.initialize(integer_tensor(name, encoding.quantize(values)))
        return GraphTensor(name, values.shape, encoding)

    def _grid(self, name: str, encoding: Encoding) -> list[str]:
        """Names of scale and zero point of an encoding."""
        zero_point = np.array(encoding.zero_point, encoding.dtype)
        return [
            self.constant(f"{name}/scale", np.array(encoding.scale, np.float32)),
            self.initialize(integer_tensor(f"{name}/zero_point", zero_point)),
        ]
