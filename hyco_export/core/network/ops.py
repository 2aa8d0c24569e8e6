"""The operations a static network is made of; a backend computes them or writes them into a graph.

A network is one function `build(ops, network)` that calls these methods. Each call names the tensor it makes; the same
names serve the float values, the calibrated ranges and the integer graph. Shapes are static, there is no batch axis.
Knows neither torch nor onnx: `nn.torch_ops` and `graph.qdq_ops` are the two backends.

Legend of shapes: R rows, K inputs of a linear layer, N outputs, n any.

Which tensors need a calibrated range: every input, and results of linear, rms_norm, add, mul, scale, shift, matmul,
lookup and convert. The others have one by construction: layout operations and exclude keep that of their operand,
softmax has [0, 1], tanh [-1, 1], mask that of its scores plus the hidden value.
"""

from collections.abc import Sequence
from typing import Protocol, TypeVar

T = TypeVar("T")

ARGMAX_LIMIT = 65_536  # longest axis over which HTP computes ArgMax right (QAIRT 2.51: index modulo 65,536 beyond it)


class Ops(Protocol[T]):
    """One backend. `T` is its tensor: a torch tensor, or a named tensor of the graph under construction."""

    def input(self, name: str, shape: tuple[int, ...]) -> T:
        """A real-valued graph input; an integer graph takes it in the encoding of that name."""
        ...

    def output(self, name: str, tensor: T) -> None:
        """Give a tensor out; `name` is the name it was made with."""
        ...

    def linear(self, name: str, x: T, weight: str) -> T:
        """x [R, K] times the transposed matrix `weight` [N, K]: [R, N]."""
        ...

    def rms_norm(self, name: str, x: T, weight: str | None, epsilon: float) -> T:
        """x / sqrt(mean(x^2) + epsilon) over the last axis, times the vector `weight` if there is one."""
        ...

    def add(self, name: str, a: T, b: T) -> T:
        """a + b, broadcast."""
        ...

    def mul(self, name: str, a: T, b: T) -> T:
        """a * b, broadcast."""
        ...

    def scale(self, name: str, x: T, factor: float) -> T:
        """x * factor, factor > 0."""
        ...

    def shift(self, name: str, x: T, offset: float) -> T:
        """x + offset, offset > 0."""
        ...

    def tanh(self, name: str, x: T) -> T: ...

    def softmax(self, name: str, x: T) -> T:
        """Over the last axis."""
        ...

    def mask(self, name: str, scores: T, mask: T) -> T:
        """scores + mask, broadcast; mask is 0 where visible and a constant between -50 and -255 where hidden."""
        ...

    def matmul(self, name: str, a: T, b: T) -> T:
        """a [.., R, K] @ b [.., K, C]; on HTP `b` should be 8-bit (two 16-bit operands cost 40 dB)."""
        ...

    def reshape(self, name: str, x: T, shape: tuple[int, ...]) -> T: ...

    def transpose(self, name: str, x: T, order: tuple[int, ...]) -> T: ...

    def slice(self, name: str, x: T, axis: int, start: int, stop: int) -> T:
        """x[start:stop] along `axis` (not negative)."""
        ...

    def concat(self, name: str, parts: Sequence[T], axis: int) -> T:
        """Parts must have one encoding: `convert` them first."""
        ...

    def convert(self, name: str, x: T, like: str) -> T:
        """The same real values in the encoding of the tensor `like` (a name): a change of grid, nothing in float."""
        ...

    def argmax(self, name: str, x: T) -> T:
        """First index of the greatest element of x [1, n]: int32 [1]."""
        ...

    def exclude(self, name: str, x: T, index: T) -> T:
        """x [1, n], the element at `index` (int32 [1]) lowered to the bottom of its range: argmax finds the next."""
        ...

    def lookup(self, name: str, table: str, index: T) -> T:
        """Rows of an integer table with one scale per row: [1, H] for index int32 [1]."""
        ...
