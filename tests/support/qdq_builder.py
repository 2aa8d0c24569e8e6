"""Builds small QDQ graphs node by node, right by construction or wrong on purpose, for tests of compiler and lint."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from hyco_export.core.encodings import Encoding, encoding_from_range

ONNX_DTYPES = {
    "uint8": TensorProto.UINT8,
    "int8": TensorProto.INT8,
    "uint16": TensorProto.UINT16,
    "int32": TensorProto.INT32,
    "float32": TensorProto.FLOAT,
}
SUB_BYTE = frozenset({TensorProto.INT4, TensorProto.UINT4, TensorProto.INT2, TensorProto.UINT2})


@dataclass(frozen=True)
class Quantized:
    """An integer tensor with its grid."""

    name: str
    shape: tuple[int, ...]
    encoding: Encoding


class QdqBuilder:
    """Collects nodes and constants; every quantised tensor `x` is written as `x` and read as `x_real`."""

    def __init__(self, opset: int = 21, ir_version: int = 10) -> None:
        self.opset, self.ir_version = opset, ir_version
        self.nodes: list[onnx.NodeProto] = []
        self.constants: list[onnx.TensorProto] = []
        self.inputs: list[onnx.ValueInfoProto] = []
        self.outputs: list[onnx.ValueInfoProto] = []
        self._names: set[str] = set()

    def constant(self, name: str, value: np.ndarray) -> str:
        if name not in self._names:
            self._names.add(name)
            self.constants.append(numpy_helper.from_array(np.asarray(value), name))
        return name

    def _integers(self, name: str, integers: np.ndarray, dtype: int) -> str:
        """A constant of any integer type, sub-byte ones packed."""
        if dtype in SUB_BYTE:
            self.constants.append(helper.make_tensor(name, dtype, integers.shape, integers.reshape(-1).tolist()))
            return name
        return self.constant(name, integers.astype(helper.tensor_dtype_to_np_dtype(dtype)))

    def node(self, op: str, inputs: Sequence[str], outputs: Sequence[str], **attributes: object) -> str:
        self.nodes.append(helper.make_node(op, list(inputs), list(outputs), name=f"{op}_{outputs[0]}", **attributes))
        return outputs[0]

    def input(self, name: str, shape: tuple[int, ...], low: float, high: float, dtype: str = "uint16") -> Quantized:
        self.inputs.append(helper.make_tensor_value_info(name, ONNX_DTYPES[dtype], shape))
        return Quantized(name, shape, encoding_from_range(low, high, dtype))  # type: ignore[arg-type]

    def plain_input(self, name: str, shape: tuple[int, ...], dtype: str = "int32") -> str:
        self.inputs.append(helper.make_tensor_value_info(name, ONNX_DTYPES[dtype], shape))
        return name

    def real(self, tensor: Quantized) -> str:
        """The tensor dequantised."""
        name = f"{tensor.name}_real"
        if name not in self._names:
            self._names.add(name)
            self.node("DequantizeLinear", [tensor.name, *self.grid(tensor.name, tensor.encoding)], [name])
        return name

    def grid(self, name: str, encoding: Encoding) -> list[str]:
        return [
            self.constant(f"{name}_scale", np.float32(encoding.scale)),
            self.constant(f"{name}_zero", np.array(encoding.zero_point, encoding.dtype)),
        ]

    def quantize(
        self, real: str, name: str, shape: tuple[int, ...], low: float, high: float, dtype: str = "uint16"
    ) -> Quantized:
        """Write the real tensor on a grid."""
        encoding = encoding_from_range(low, high, dtype)  # type: ignore[arg-type]
        self.node("QuantizeLinear", [real, *self.grid(name, encoding)], [name])
        return Quantized(name, shape, encoding)

    def weight(
        self,
        name: str,
        integers: np.ndarray,
        scales: np.ndarray,
        axis: int,
        dtype: int = TensorProto.INT4,
        zero_points: np.ndarray | None = None,
        **more: int,
    ) -> str:
        """A weight dequantised per channel of `axis`, symmetric unless told; `more` goes to DequantizeLinear."""
        self._integers(name, integers, dtype)
        scale = self.constant(f"{name}_scale", np.asarray(scales, np.float32))
        zeros = np.zeros(np.shape(scales), np.int64) if zero_points is None else zero_points
        zero = self._integers(f"{name}_zero", zeros, dtype)
        return self.node("DequantizeLinear", [name, scale, zero], [f"{name}_real"], axis=axis, **more)

    def block_weight(
        self, name: str, integers: np.ndarray, multipliers: np.ndarray, scales: np.ndarray, nested: bool = True
    ) -> str:
        """A weight [K, N] in blocks of inputs: multipliers [J, N] times scales [N], or their products as floats."""
        self._integers(name, integers, TensorProto.INT4)
        products = f"{name}_block_scale"
        if nested:
            grid = [
                self.constant(f"{name}_scale", scales),
                self.constant(f"{name}_none", np.zeros(len(scales), np.uint8)),
            ]
            self.node("DequantizeLinear", [self.constant(f"{name}_by", multipliers), *grid], [products], axis=1)
        else:
            self.constant(products, (multipliers * scales).astype(np.float32))
        zero = self._integers(f"{name}_zero", np.zeros(multipliers.shape, np.int64), TensorProto.INT4)
        block = len(integers) // len(multipliers)
        return self.node("DequantizeLinear", [name, products, zero], [f"{name}_real"], axis=0, block_size=block)

    def output(self, tensor: Quantized) -> None:
        self.plain_output(tensor.name, tensor.shape, tensor.encoding.dtype)

    def plain_output(self, name: str, shape: tuple[int, ...], dtype: str = "int32") -> None:
        self.outputs.append(helper.make_tensor_value_info(name, ONNX_DTYPES[dtype], shape))

    def model(self) -> onnx.ModelProto:
        graph = helper.make_graph(self.nodes, "test", self.inputs, self.outputs, self.constants)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", self.opset)], ir_version=self.ir_version)

    def save(self, path: Path) -> Path:
        model = self.model()
        onnx.checker.check_model(model)
        onnx.save(model, path)
        return path


def random_linear(
    rng: np.random.Generator, rows: int, columns: int, low: int = -8, high: int = 7
) -> tuple[np.ndarray, np.ndarray]:
    """Distinct integers [rows, columns] in [low, high] and scales [rows]."""
    return rng.integers(low, high + 1, (rows, columns)), rng.uniform(0.01, 0.02, rows).astype(np.float32)


def linear_in_blocks(nested: bool = True, operator: str = "MatMul", act: str = "uint16") -> QdqBuilder:
    """x [4, 128] times a weight [128, 96] in blocks of 64 inputs."""
    rng = np.random.default_rng(1)
    build = QdqBuilder()
    x = build.input("x", (4, 128), -4, 4, act)
    integers, scales = random_linear(rng, 128, 96)
    multipliers = rng.integers(1, 17, (2, 96)).astype(np.uint8)
    multipliers[0] = 16
    w = build.block_weight("w", integers, multipliers, scales[:96] / 8, nested)
    build.output(build.quantize(build.node(operator, [build.real(x), w], ["out"]), "y", (4, 96), -30, 30))
    return build


def two_layer_mlp(
    rows: int = 4, width: int = 32, hidden: int = 48, seed: int = 0, limits: tuple[int, int] = (-8, 7)
) -> QdqBuilder:
    """x [rows, width] -> int4 Gemm -> Tanh -> int4 Gemm -> y [rows, width], all on 16-bit grids; `limits` of `up`."""
    rng = np.random.default_rng(seed)
    build = QdqBuilder()
    x = build.input("x", (rows, width), -4, 4)
    up = build.weight("up", *random_linear(rng, hidden, width, *limits), axis=0)
    h = build.quantize(build.node("Gemm", [build.real(x), up], ["h_out"], transB=1), "h", (rows, hidden), -4, 4)
    t = build.quantize(build.node("Tanh", [build.real(h)], ["t_out"]), "t", (rows, hidden), -1, 1)
    down = build.weight("down", *random_linear(rng, width, hidden), axis=0)
    y = build.quantize(build.node("Gemm", [build.real(t), down], ["y_out"], transB=1), "y", (rows, width), -2, 2)
    build.output(y)
    return build
