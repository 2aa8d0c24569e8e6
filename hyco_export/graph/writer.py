"""ONNX graphs under construction: node units between Q and DQ, packed integer weights, and external data files.

Every tensor between two nodes is an integer tensor with one encoding; a node unit is DequantizeLinear (one per use) ->
node -> QuantizeLinear (`GraphWriter`). `weight_tensor` and `read_weight` pack INT4 and INT8 initializers and read them
back; `ExternalData` puts large weights of one or more graphs into a file beside them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from onnx.external_data_helper import ExternalDataInfo, set_external_data, uses_external_data

from hyco_export.core.device_spec import TensorSpec
from hyco_export.core.encodings import Encoding, encoding_from_range
from hyco_export.core.files import close_on_disk
from hyco_export.core.network.weights import IntegerMatrix

PAGE_BYTES = 4096  # ONNX Runtime maps a tensor that starts on a page
INLINE_BYTES = 64 * 1024  # smaller tensors stay in the graph: scales, zero points, norms
OPSET = 23  # the first with RMSNormalization
IR_VERSION = 11  # of opset 23
ONNX_TYPES = {
    "uint8": TensorProto.UINT8,
    "int8": TensorProto.INT8,
    "uint16": TensorProto.UINT16,
    "int16": TensorProto.INT16,
    "int32": TensorProto.INT32,
}
CARRIERS = {2: TensorProto.INT4, 4: TensorProto.INT4, 8: TensorProto.INT8}
"""ONNX type by width in the checkpoint. 2-bit integers travel as INT4, values unchanged: INT2 gives noise on HTP."""


class ExternalData:
    """A data file under construction; a context manager.

    Args:
        path: the file; graphs that refer to it must lie in the same folder.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stored: dict[str, list[TensorProto]] = {}
        self._file = path.open("wb")

    def place(self, name: str, make: Callable[[], list[TensorProto]]) -> list[TensorProto]:
        """The initializers of the linear layer `name`, their large values moved to the file.

        Args:
            make: the initializers with their values; called for the first graph that uses the layer only.
        """
        if name not in self._stored:
            self._stored[name] = [self._moved(tensor) for tensor in make()]
        return self._stored[name]

    def _moved(self, tensor: TensorProto) -> TensorProto:
        if len(tensor.raw_data) <= INLINE_BYTES:
            return tensor
        offset = -(-self._file.tell() // PAGE_BYTES) * PAGE_BYTES
        self._file.seek(offset)
        self._file.write(tensor.raw_data)
        set_external_data(tensor, self._path.name, offset, len(tensor.raw_data))
        tensor.ClearField("raw_data")
        return tensor

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        close_on_disk(self._file)


def raw_bytes(tensor: TensorProto, folder: Path | None) -> np.ndarray:
    """uint8 [n]: an initializer's values, from its own bytes or mapped from the file in `folder` that holds them."""
    if not uses_external_data(tensor):
        return np.frombuffer(tensor.raw_data, np.uint8)
    place = ExternalDataInfo(tensor)
    assert place.length is not None, tensor.name  # `ExternalData` always says it
    return np.memmap((folder or Path()) / place.location, np.uint8, "r", int(place.offset or 0), (int(place.length),))


def integer_tensor(name: str, values: np.ndarray) -> onnx.TensorProto:
    """values of a numpy integer dtype, as they are."""
    return numpy_helper.from_array(np.ascontiguousarray(values), name)


def weight_tensor(name: str, integers: np.ndarray, bits: int) -> onnx.TensorProto:
    """int8 values [...] that fit `bits` -> INT4 (two per byte, low half first) or INT8."""
    kind = CARRIERS[bits]
    flat = np.ascontiguousarray(integers, np.int8).reshape(-1)
    if kind == TensorProto.INT4:
        flat = pack_int4(flat)
    return helper.make_tensor(name, kind, integers.shape, flat.tobytes(), raw=True)


def pack_int4(flat: np.ndarray) -> np.ndarray:
    """int8 [n] in -8..7 -> uint8 [ceil(n / 2)]."""
    halves = np.zeros(len(flat) + len(flat) % 2, np.uint8)
    halves[: len(flat)] = flat.astype(np.uint8) & 0x0F
    return halves[0::2] | (halves[1::2] << 4)


def read_weight(tensor: onnx.TensorProto, folder: Path | None = None) -> np.ndarray:
    """int8 values [...] of an INT4 or INT8 initializer; `folder` holds its external data, if it has some."""
    shape = tuple(tensor.dims)
    raw = raw_bytes(tensor, folder)
    if tensor.data_type == TensorProto.INT8:
        return raw.view(np.int8).reshape(shape)
    halves = np.empty((len(raw), 2), np.uint8)  # filled in place: an output layer has 132 million values
    np.bitwise_and(raw, 0x0F, out=halves[:, 0])
    np.right_shift(raw, 4, out=halves[:, 1])
    halves ^= 8
    signed = halves.view(np.int8)
    signed -= 8
    return signed.reshape(-1)[: int(np.prod(shape))].reshape(shape)


def matrix_parameters(name: str) -> tuple[str, str]:
    """Names of the scales and zero points of the linear layer `name`."""
    return f"{name}/scale", f"{name}/zero_point"


def block_parameters(name: str) -> tuple[str, str, str, str]:
    """Names of the multipliers, their scales and zero points, and the zero points of the blocks of layer `name`."""
    return f"{name}/multiplier", f"{name}/scale", f"{name}/multiplier_zero_point", f"{name}/zero_point"


def carried_blocks(name: str, matrix: IntegerMatrix) -> list[onnx.TensorProto]:
    """A linear layer in blocks, transposed as HTP wants it: integers [K, N], multipliers [J, N], scales [N], zeros.

    Raises:
        ValueError: the matrix has one scale per output channel.
    """
    if matrix.multipliers is None:
        raise ValueError(f"{name} has no blocks")
    multiplier, scale, multiplier_zero, zero_point = block_parameters(name)
    return [
        weight_tensor(name, np.ascontiguousarray(matrix.integers.T), matrix.bits),
        integer_tensor(multiplier, matrix.multipliers.T),
        numpy_helper.from_array(matrix.scales.astype(np.float32), scale),
        integer_tensor(multiplier_zero, np.zeros(len(matrix.scales), np.uint8)),
        weight_tensor(zero_point, np.zeros(matrix.multipliers.T.shape, np.int8), matrix.bits),
    ]


def carried_matrix(name: str, matrix: IntegerMatrix) -> list[onnx.TensorProto]:
    """A linear layer's three initializers: integers [N, K], scales [N], zero points [N] (all 0, as HTP wants them)."""
    scale, zero_point = matrix_parameters(name)
    return [
        weight_tensor(name, matrix.integers, matrix.bits),
        numpy_helper.from_array(matrix.scales.astype(np.float32), scale),
        weight_tensor(zero_point, np.zeros(len(matrix.scales), np.int8), matrix.bits),
    ]


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
        """Whether there is an initializer of this name."""
        return name in self._initializers

    def length(self, name: str) -> int:
        """First dimension of an initializer."""
        return int(self._initializers[name].dims[0])

    def initialize(self, tensor: onnx.TensorProto) -> str:
        """Store a constant unless it is stored already; returns its name.

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
        self.node("DequantizeLinear", [tensor.name, *self._parameters(tensor.name, tensor.encoding)], view)
        return view

    def quantize(self, view: str, name: str, shape: tuple[int, ...], encoding: Encoding) -> GraphTensor:
        """A real view quantised under `name`."""
        self.node("QuantizeLinear", [view, *self._parameters(name, encoding)], name)
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
        """One node unit: tensors are read through real views, plain names as they are; `encoding` is the result's."""
        names = [self.real(part) if isinstance(part, GraphTensor) else part for part in inputs]
        if encoding is None:
            self.node(kind, names, name, **attributes)
            return GraphTensor(name, shape, None)
        view = self.view(name)
        self.node(kind, names, view, **attributes)
        return self.quantize(view, name, shape, encoding)

    def vector(self, name: str, values: np.ndarray) -> GraphTensor:
        """A float constant in 16 bits with an encoding of its own (norm scales: 83-85 dB; as a float island 71 dB)."""
        return self._stored(name, values, encoding_from_range(values.min(), values.max(), "uint16"))

    def scalar(self, name: str, value: float) -> GraphTensor:
        """A positive constant in 16 bits, the top of its own encoding."""
        return self._stored(name, np.array(value, np.float32), encoding_from_range(0.0, value, "uint16"))

    def _stored(self, name: str, values: np.ndarray, encoding: Encoding) -> GraphTensor:
        self.initialize(integer_tensor(name, encoding.quantize(values)))
        return GraphTensor(name, values.shape, encoding)

    def _parameters(self, name: str, encoding: Encoding) -> list[str]:
        """Names of scale and zero point of an encoding."""
        zero_point = np.array(encoding.zero_point, encoding.dtype)
        return [
            self.constant(f"{name}/scale", np.array(encoding.scale, np.float32)),
            self.initialize(integer_tensor(f"{name}/zero_point", zero_point)),
        ]
