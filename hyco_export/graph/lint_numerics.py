"""Lint checks of a QDQ graph's numbers: operators, widths and quantisation parameters that HTP computes wrongly."""

from collections.abc import Iterator

import numpy as np
import onnx
from onnx import TensorProto

from hyco_export.graph.index import GraphIndex, attribute
from hyco_export.graph.lint_structure import Breach, place

INDEX_LIMIT = 65_536  # elements of an axis that TopK, ArgMax and ArgMin can address
# A mask must vanish in a softmax and leave its input some resolution: a 16-bit range spans scores and mask. The recipes
# take -100: exp(-100) is 0 in float32.
MASK_LOWEST, MASK_HIGHEST = -255.0, -50.0
LAYOUT = frozenset({"Reshape", "Squeeze", "Unsqueeze", "Transpose", "Slice", "Concat", "Expand", "Identity"})
PRODUCTS = frozenset({"MatMul", "Gemm"})
INT8_TYPES: dict[int, int] = {TensorProto.UINT8: 128, TensorProto.INT8: 0}  # element type -> zero point of the middle
INT16_TYPES = frozenset({TensorProto.UINT16, TensorProto.INT16})
INT2_TYPES = frozenset({TensorProto.INT2, TensorProto.UINT2})


def index_range(model: onnx.ModelProto, index: GraphIndex) -> Iterator[Breach]:
    """TopK, ArgMax and ArgMin search at most 65,536 elements."""
    defaults = {"ArgMax": 0, "ArgMin": 0, "TopK": -1}
    for node in index.nodes:
        if node.op_type not in defaults:
            continue
        shape = index.shape(node.input[0])
        axis = attribute(node, "axis", defaults[node.op_type])
        length = None if shape is None else shape[axis]
        if length is None or length > INDEX_LIMIT:
            yield Breach(place(node), f"{node.op_type} over {length or 'an unknown number of'} elements")


def topk(model: onnx.ModelProto, index: GraphIndex) -> Iterator[Breach]:
    """No TopK on a 16-bit tensor."""
    for node in index.nodes:
        if node.op_type == "TopK":
            source = index.stored(node.input[0])
            if source is None or index.element_type(source) in INT16_TYPES:
                yield Breach(place(node), "TopK of 16-bit values")


def gelu(model: onnx.ModelProto, index: GraphIndex) -> Iterator[Breach]:
    """No native Gelu."""
    for node in index.nodes:
        if node.op_type in ("Gelu", "FastGelu"):
            yield Breach(place(node), f"native {node.op_type}")


def decomposed_norm(model: onnx.ModelProto, index: GraphIndex) -> Iterator[Breach]:
    """No square root: in these networks it only occurs in a norm written out."""
    for node in index.nodes:
        if node.op_type == "Sqrt":
            yield Breach(place(node), "a norm written out with Sqrt")


def norm_scale(model: onnx.ModelProto, index: GraphIndex) -> Iterator[Breach]:
    """The scale of RMSNormalization is stored in 16 bits."""
    for node in index.nodes:
        if node.op_type == "RMSNormalization":
            source = index.stored(node.input[1])
            if source is None or index.element_type(source) not in INT16_TYPES:
                yield Breach(place(node), "the scale is not on a 16-bit grid")


def softmax_mask(model: onnx.ModelProto, index: GraphIndex) -> Iterator[Breach]:
    """A mask added before Softmax reaches into [-255, -50], and so does the range of the sum."""
    for softmax in index.nodes:
        if softmax.op_type != "Softmax":
            continue
        add = index.made_by(index.origin(softmax.input[0], LAYOUT), "Add")
        if add is None:
            continue
        lows = [low for low in (_mask_low(name, index) for name in add.input) if low is not None]
        for low in lows:
            if not MASK_LOWEST <= low <= MASK_HIGHEST:
                yield Breach(place(add), f"a mask that reaches {low:.4g}, outside [{MASK_LOWEST:g}, {MASK_HIGHEST:g}]")
        if lows:
            yield from _sum_breaches(add, index)


def _mask_low(real: str, index: GraphIndex) -> float | None:
    """The least value of a constant or an input; None for a computed operand (the scores)."""
    source = index.origin(real, LAYOUT)
    reader = next((n for n in index.consumers[source] if n.op_type == "DequantizeLinear"), None)
    if source not in index.inputs and source not in index.constants:
        return None
    if reader is None:  # a float constant, or a float input
        return float(index.values(source).min()) if source in index.constants else -np.inf
    if source in index.inputs:
        bounds = index.range(reader)
        return None if bounds is None else bounds[0]
    scale, zero_point = index.parameters(reader) or (np.ones(1), np.zeros(1))
    return float(((index.values(source).astype(np.int64) - zero_point) * scale).min())


def _sum_breaches(add: onnx.NodeProto, index: GraphIndex) -> Iterator[Breach]:
    for reader in index.consumers[add.output[0]]:
        bounds = index.range(reader) if reader.op_type == "QuantizeLinear" else None
        if bounds is not None and bounds[0] > MASK_HIGHEST:
            yield Breach(place(add), f"the masked scores are stored down to {bounds[0]:.4g} only")


def wide_matmul(model: onnx.ModelProto, index: GraphIndex) -> Iterator[Breach]:
    """No product of two 16-bit activations."""
    for node, sources in _activation_products(index):
        if all(index.element_type(source) in INT16_TYPES for source in sources):
            yield Breach(place(node), f"{node.op_type} of two 16-bit activations, {sources[0]} and {sources[1]}")


def matmul_offset(model: onnx.ModelProto, index: GraphIndex) -> Iterator[Breach]:
    """The 8-bit side of a product of activations has its zero in the middle: 128 of uint8, 0 of int8."""
    for node, sources in _activation_products(index):
        for real, source in zip(node.input[:2], sources, strict=True):
            centre = INT8_TYPES.get(index.element_type(source))
            found = index.parameters(index.producer[real])
            if centre is not None and found is not None and np.any(found[1] != centre):
                yield Breach(place(node), f"{source} has zero point {int(found[1].flat[0])} instead of {centre}")


def _activation_products(index: GraphIndex) -> Iterator[tuple[onnx.NodeProto, list[str]]]:
    """Products of two activations (neither operand a constant), with the integer tensors they read."""
    for node in index.nodes:
        if node.op_type in PRODUCTS:
            sources = [index.stored(name) for name in node.input[:2]]
            found = [source for source in sources if source is not None and source not in index.constants]
            if len(found) == 2:
                yield node, found


def int2(model: onnx.ModelProto, index: GraphIndex) -> Iterator[Breach]:
    """No 2-bit tensors."""
    for name, constant in index.constants.items():
        if constant.data_type in INT2_TYPES:
            yield Breach(name, f"{TensorProto.DataType.Name(constant.data_type)} constant")


def uint4(model: onnx.ModelProto, index: GraphIndex) -> Iterator[Breach]:
    """No unsigned 4-bit tensors."""
    for name, constant in index.constants.items():
        if constant.data_type == TensorProto.UINT4:
            yield Breach(name, "UINT4 constant")


def int4_zero_point(model: onnx.ModelProto, index: GraphIndex) -> Iterator[Breach]:
    """A 4-bit weight is symmetric and says so: a stored zero point, all zeros."""
    for node in _weight_readers(index):
        if index.element_type(node.input[0]) != TensorProto.INT4:
            continue
        zero_points = index.zero_points(node)
        if zero_points is None:
            yield Breach(place(node), f"INT4 {node.input[0]} without a stored zero point")
        elif np.any(zero_points):
            yield Breach(place(node), f"INT4 {node.input[0]} with a zero point other than 0")


def int4_table(model: onnx.ModelProto, index: GraphIndex) -> Iterator[Breach]:
    """No lookup in a 4-bit table."""
    for node in index.nodes:
        if node.op_type == "Gather":
            source = index.stored(node.input[0]) or node.input[0]
            if source in index.constants and index.element_type(source) == TensorProto.INT4:
                yield Breach(place(node), f"Gather from INT4 {source}")


def channel_axis(model: onnx.ModelProto, index: GraphIndex) -> Iterator[Breach]:
    """Per-channel scales lie on the output channel of the product that reads the weight."""
    for node in _weight_readers(index):
        scales = index.constants.get(node.input[1])
        if scales is None or int(np.prod(scales.dims)) == 1 or attribute(node, "block_size", 0):
            continue
        rank = len(index.constants[node.input[0]].dims)
        axis = attribute(node, "axis", 1) % rank
        for reader in index.consumers[node.output[0]]:
            if _reads_as_scale(reader, node.output[0]):
                continue  # multipliers of a weight in blocks: `block_scales` looks at these
            wanted = _output_axis(reader, node.output[0], rank)
            if wanted != axis:
                said = "none allowed" if wanted is None else f"the output channel is axis {wanted}"
                yield Breach(place(node), f"scales of {node.input[0]} on axis {axis}, {reader.op_type}: {said}")


def _output_axis(reader: onnx.NodeProto, weight: str, rank: int) -> int | None:
    """Which axis of `weight` is the output channel of `reader`; None where per-channel scales cannot stand."""
    if reader.op_type in PRODUCTS and reader.input[1] == weight:
        return rank - 2 if attribute(reader, "transB", 0) else rank - 1
    return 0 if reader.op_type == "Conv" and reader.input[1] == weight else None


def _reads_as_scale(reader: onnx.NodeProto, real: str) -> bool:
    return reader.op_type == "DequantizeLinear" and reader.input[1] == real


def block_scales(model: onnx.ModelProto, index: GraphIndex) -> Iterator[Breach]:
    """Block-wise scales are integer multiples of scales per channel, before a MatMul with a 16-bit operand."""
    for node in _weight_readers(index):
        if not attribute(node, "block_size", 0):
            continue
        if index.made_by(node.input[1], "DequantizeLinear") is None:
            yield Breach(place(node), f"block-wise {node.input[0]} with float scales of its own")
        for reader in index.consumers[node.output[0]]:
            source = index.stored(reader.input[0])
            if source is not None and index.element_type(source) in INT8_TYPES:
                yield Breach(place(node), f"block-wise {node.input[0]} with 8-bit {source}")
            if reader.op_type != "MatMul":
                yield Breach(place(node), f"block-wise {node.input[0]} before {reader.op_type}, which takes none")


def _weight_readers(index: GraphIndex) -> Iterator[onnx.NodeProto]:
    """DequantizeLinear nodes that read a stored tensor."""
    for node in index.nodes:
        if node.op_type == "DequantizeLinear" and node.input[0] in index.constants:
            yield node
