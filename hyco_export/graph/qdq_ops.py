"""The ONNX backend of static networks: every operation becomes a node between DequantizeLinear and QuantizeLinear.

Only forms that HTP computes correctly: opset 23 with native RMSNormalization, INT4/INT8 weights per output channel,
integers at every graph input and output, one DequantizeLinear per use. A tensor between two nodes is an integer tensor
with one encoding (`graph.writer`).
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto

from hyco_export.core.device_spec import GraphSpec
from hyco_export.core.encodings import Encoding, IntegerDtype, encoding_from_range
from hyco_export.core.network.blocks import ARGMAX_LIMIT
from hyco_export.core.network.weights import IntegerMatrix, PackedMatrices, Weights
from hyco_export.graph.writer import (
    ExternalData,
    GraphTensor,
    GraphWriter,
    block_parameters,
    carried_blocks,
    carried_matrix,
    integer_tensor,
    matrix_parameters,
)

PROBABILITY = encoding_from_range(0.0, 1.0, "uint16")  # softmax
WIDE: IntegerDtype = "uint16"
LOW_PRODUCT_SHARE = 16  # a half of 256 times finer steps gives products at least so many times smaller
UNIT = encoding_from_range(-1.0, 1.0, "uint16")  # tanh


class QdqOps:
    """Writes one graph.

    Args:
        name: of the graph.
        weights: integer matrices, float vectors (stored as uint16) and integer tables.
        encodings: by tensor name, for every tensor with a calibrated range.
        data: where the values of large matrices go; None keeps them in the graph.
    """

    def __init__(
        self, name: str, weights: Weights, encodings: Mapping[str, Encoding], data: ExternalData | None = None
    ) -> None:
        self._name = name
        self._weights = weights
        self._encodings = encodings
        self._data = data
        self._graph = GraphWriter()
        self._inputs: list[GraphTensor] = []
        self._outputs: list[GraphTensor] = []
        self._split: dict[str, tuple[GraphTensor, GraphTensor]] = {}  # 16-bit operands by name

    # ---- the graph itself

    def model(self) -> onnx.ModelProto:
        """The finished graph."""
        return self._graph.model(self._name, self._inputs, self._outputs)

    def spec(self) -> GraphSpec:
        """Its inputs and outputs."""
        return GraphSpec(
            self._name,
            tuple(tensor.spec() for tensor in self._inputs),
            tuple(tensor.spec() for tensor in self._outputs),
        )

    def input(self, name: str, shape: tuple[int, ...]) -> GraphTensor:
        tensor = GraphTensor(name, shape, self._encoding(name))
        self._inputs.append(tensor)
        return tensor

    def output(self, name: str, tensor: GraphTensor) -> None:
        if tensor.name != name:
            raise ValueError(f"output {name} was made with the name {tensor.name}")
        self._outputs.append(tensor)

    # ---- arithmetic

    def linear(self, name: str, x: GraphTensor, weight: str) -> GraphTensor:
        blocks = self._in_blocks(weight)
        if blocks is not None:
            shape = (x.shape[0], blocks.integers.shape[0])
            return self._graph.emit("MatMul", name, [x, self._blocks(weight, blocks)], shape, self._encoding(name))
        view = self._graph.view(weight)
        parameters, channels = self._stored(weight)
        self._graph.node("DequantizeLinear", parameters, view, axis=0)  # [N, K]: output channel
        shape = (x.shape[0], channels)
        return self._graph.emit("Gemm", name, [x, view], shape, self._encoding(name), transB=1)

    def rms_norm(self, name: str, x: GraphTensor, weight: str | None, epsilon: float) -> GraphTensor:
        vector = np.ones(x.shape[-1], np.float32) if weight is None else self._weights.vectors[weight]
        scale = self._graph.vector(weight or f"ones.{x.shape[-1]}", vector)
        attributes = {"axis": -1, "epsilon": epsilon, "stash_type": 1}
        return self._graph.emit("RMSNormalization", name, [x, scale], x.shape, self._encoding(name), **attributes)

    def add(self, name: str, a: GraphTensor, b: GraphTensor) -> GraphTensor:
        return self._binary("Add", name, a, b, self._encoding(name))

    def mul(self, name: str, a: GraphTensor, b: GraphTensor) -> GraphTensor:
        return self._binary("Mul", name, a, b, self._encoding(name))

    def weigh(self, name: str, x: GraphTensor, weight: str) -> GraphTensor:
        vector = self._graph.vector(weight, self._weights.vectors[weight])
        return self._binary("Mul", name, x, vector, self._encoding(name))

    def scale(self, name: str, x: GraphTensor, factor: float) -> GraphTensor:
        return self._binary("Mul", name, x, self._graph.scalar(f"{name}/factor", factor), self._encoding(name))

    def shift(self, name: str, x: GraphTensor, offset: float) -> GraphTensor:
        return self._binary("Add", name, x, self._graph.scalar(f"{name}/offset", offset), self._encoding(name))

    def tanh(self, name: str, x: GraphTensor) -> GraphTensor:
        return self._graph.emit("Tanh", name, [x], x.shape, UNIT)

    def softmax(self, name: str, x: GraphTensor) -> GraphTensor:
        return self._graph.emit("Softmax", name, [x], x.shape, PROBABILITY, axis=-1)

    def mask(self, name: str, scores: GraphTensor, mask: GraphTensor) -> GraphTensor:
        low, high = _ends(scores)
        hidden, _ = _ends(mask)
        return self._binary("Add", name, scores, mask, encoding_from_range(low + hidden, high, "uint16"))

    def matmul(self, name: str, a: GraphTensor, b: GraphTensor) -> GraphTensor:
        shape, encoding = (*a.shape[:-1], b.shape[-1]), self._encoding(name)
        if b.dtype != WIDE:
            return self._graph.emit("MatMul", name, [a, b], shape, encoding)
        high, low = self._halves(b)
        top = max(map(abs, _range(encoding))) / LOW_PRODUCT_SHARE
        small = encoding_from_range(-top, top, WIDE)
        parts = [
            self._graph.emit("MatMul", f"{name}.{half}", [a, part], shape, grid)
            for half, part, grid in (("high", high, encoding), ("low", low, small))
        ]
        return self._binary("Add", name, parts[0], parts[1], encoding)

    def _halves(self, x: GraphTensor) -> tuple[GraphTensor, GraphTensor]:
        """A 16-bit tensor centred on 0 as the sum of two 8-bit ones: steps of 256 and of 1. HTP computes the product of
        two 16-bit tensors at 41 dB, those with the halves at 79 and more."""
        if x.name not in self._split:
            assert x.encoding is not None
            coarse, fine = (Encoding("uint8", factor * x.encoding.scale, 128) for factor in (256.0, 1.0))
            high = self._graph.quantize(self._graph.real(x), f"{x.name}.high", x.shape, coarse)
            again = self._graph.quantize(self._graph.real(high), f"{x.name}.high_16", x.shape, x.encoding)
            rest = self._binary("Sub", f"{x.name}.rest", x, again, x.encoding)
            low = self._graph.quantize(self._graph.real(rest), f"{x.name}.low", x.shape, fine)
            self._split[x.name] = high, low
        return self._split[x.name]

    # ---- layout: the operand's encoding stays

    def reshape(self, name: str, x: GraphTensor, shape: tuple[int, ...]) -> GraphTensor:
        return self._moved("Reshape", name, x, [self._graph.ints(*shape)], shape)

    def transpose(self, name: str, x: GraphTensor, order: tuple[int, ...]) -> GraphTensor:
        return self._moved("Transpose", name, x, [], tuple(x.shape[axis] for axis in order), perm=list(order))

    def slice(self, name: str, x: GraphTensor, axis: int, start: int, stop: int) -> GraphTensor:
        bounds = [self._graph.ints(value) for value in (start, stop, axis)]
        shape = (*x.shape[:axis], stop - start, *x.shape[axis + 1 :])
        return self._moved("Slice", name, x, bounds, shape)

    def columns(self, name: str, x: GraphTensor, index: Sequence[int]) -> GraphTensor:
        places = self._graph.constant(f"columns.{len(index)}", np.array(index, np.int32))
        return self._moved("Gather", name, x, [places], (x.shape[0], len(index)), axis=1)

    def concat(self, name: str, parts: Sequence[GraphTensor], axis: int) -> GraphTensor:
        first = parts[0]
        for part in parts:
            if part.encoding != first.encoding:
                raise ValueError(f"concat {name}: {part.name} and {first.name} differ in encoding; convert them first")
        shape = (*first.shape[:axis], sum(part.shape[axis] for part in parts), *first.shape[axis + 1 :])
        return self._graph.emit("Concat", name, parts, shape, first.encoding, axis=axis)

    def convert(self, name: str, x: GraphTensor, like: str) -> GraphTensor:
        return self._graph.quantize(self._graph.real(x), name, x.shape, self._encoding(like))

    # ---- indices

    def argmax(self, name: str, x: GraphTensor) -> GraphTensor:
        if x.shape[-1] <= ARGMAX_LIMIT:
            return self._argmax_short(name, x)
        return self._argmax_split(name, x)

    def exclude(self, name: str, x: GraphTensor, index: GraphTensor) -> GraphTensor:
        places = self._graph.constant(f"places.{x.shape[-1]}", np.arange(x.shape[-1], dtype=np.int32)[None])
        chosen = self._graph.view(name)
        self._graph.node("Equal", [places, index.name], chosen)
        bottom = GraphTensor(f"{name}/bottom", (1, 1), x.encoding)
        lowest = np.full((1, 1), np.iinfo(bottom.dtype).min, bottom.dtype)
        self._graph.initialize(integer_tensor(bottom.name, lowest))
        return self._graph.emit("Where", name, [chosen, bottom, x], x.shape, x.encoding)

    def lookup(self, name: str, table: str, index: GraphTensor) -> GraphTensor:
        source = self._weights.tables[table]
        integers = GraphTensor(table, source.integers.shape, Encoding("uint8", 1.0, source.zero_point))
        if not self._graph.has(table):  # hundreds of megabytes at full size: written once, not compared again
            self._graph.initialize(integer_tensor(table, source.integers))
        scales = self._graph.vector(f"{table}/row_scale", source.scales[:, None])
        row_shape = (1, source.integers.shape[1])
        row = self._graph.emit("Gather", f"{name}/row", [integers, index.name], row_shape, integers.encoding)
        scale = self._graph.emit("Gather", f"{name}/row_scale", [scales, index.name], (1, 1), scales.encoding)
        return self.mul(name, row, scale)

    def _argmax_short(self, name: str, x: GraphTensor) -> GraphTensor:
        wide = self._graph.view(name)
        self._graph.node("ArgMax", [self._graph.real(x)], wide, axis=-1, keepdims=0)
        self._graph.node("Cast", [wide], name, to=TensorProto.INT32)
        return GraphTensor(name, x.shape[:-1], None)

    def _argmax_split(self, name: str, x: GraphTensor) -> GraphTensor:
        """Slices within the limit; the one with the greatest maximum (the first of equals) gives the index."""
        tops: list[GraphTensor] = []
        places: list[GraphTensor] = []
        for start in range(0, x.shape[-1], ARGMAX_LIMIT):
            part = f"{name}.{start}"
            piece = self.slice(part, x, 1, start, min(start + ARGMAX_LIMIT, x.shape[-1]))
            tops.append(
                self._graph.emit(
                    "ReduceMax", f"{part}.top", [piece, self._graph.ints(-1)], (1, 1), x.encoding, keepdims=1
                )
            )
            local = self._argmax_short(f"{part}.local", piece)
            offset = self._graph.constant(f"{part}.start", np.array([start], np.int32))
            places.append(self._graph.emit("Add", f"{part}.place", [local, offset], (1,), None))
        winner = self._argmax_short(f"{name}.winner", self.concat(f"{name}.tops", tops, 1))
        candidates = self.concat(f"{name}.places", places, 0)
        return self._graph.emit("Gather", name, [candidates, winner], (1,), None)

    # ---- pieces

    def _encoding(self, name: str) -> Encoding:
        if name not in self._encodings:
            raise ValueError(f"graph {self._name}: tensor {name} has no calibrated range")
        return self._encodings[name]

    def _stored(self, weight: str) -> tuple[list[str], int]:
        """Names of a linear layer's initializers, packed at its first use, and its output channels."""
        parameters = [weight, *matrix_parameters(weight)]
        if not self._graph.has(weight):
            tensors = self._data.place(weight, lambda: self._carried(weight)) if self._data else self._carried(weight)
            for tensor in tensors:
                self._graph.initialize(tensor)
        return parameters, self._graph.length(weight)

    def _carried(self, weight: str) -> list[onnx.TensorProto]:
        matrix = self._weights.matrices[weight]
        if isinstance(matrix, np.ndarray):
            raise ValueError(f"weight {weight} is in float; an integer graph needs integers")
        return carried_matrix(weight, matrix)

    def _in_blocks(self, weight: str) -> IntegerMatrix | None:
        """The weight, if its inputs have scales by block; weights that stay in a file never have."""
        matrices = self._weights.matrices
        matrix = None if isinstance(matrices, PackedMatrices) else matrices[weight]
        return matrix if isinstance(matrix, IntegerMatrix) and matrix.multipliers is not None else None

    def _blocks(self, weight: str, matrix: IntegerMatrix) -> str:
        """A dequantised view [K, N] of a weight in blocks: multipliers [J, N] times scales [N], then the integers.

        The provider recognises low-power blocks by two DequantizeLinear in a row before a MatMul; with one and
        float scales of blocks, or before a Gemm, HTP computes in half precision or refuses.
        """
        if not self._graph.has(weight):
            for tensor in carried_blocks(weight, matrix):
                self._graph.initialize(tensor)
        multiplier, scale, multiplier_zero, zero_point = block_parameters(weight)
        scales, view = self._graph.view(multiplier), self._graph.view(weight)
        self._graph.node("DequantizeLinear", [multiplier, scale, multiplier_zero], scales, axis=1)
        inputs = [weight, scales, zero_point]
        self._graph.node("DequantizeLinear", inputs, view, axis=0, block_size=matrix.block)
        return view

    def _moved(
        self,
        kind: str,
        name: str,
        x: GraphTensor,
        parameters: Sequence[str],
        shape: tuple[int, ...],
        **attributes: Any,
    ) -> GraphTensor:
        return self._graph.emit(kind, name, [x, *parameters], shape, x.encoding, **attributes)

    def _binary(self, kind: str, name: str, a: GraphTensor, b: GraphTensor, encoding: Encoding) -> GraphTensor:
        shape = tuple(np.broadcast_shapes(a.shape, b.shape))
        return self._graph.emit(kind, name, [a, b], shape, encoding)


def _ends(tensor: GraphTensor) -> tuple[float, float]:
    """Least and greatest real value of a tensor's encoding."""
    assert tensor.encoding is not None
    return _range(tensor.encoding)


def _range(encoding: Encoding) -> tuple[float, float]:
    info = np.iinfo(encoding.dtype)
    low, high = encoding.dequantize(np.array([info.min, info.max]))
    return float(low), float(high)
