"""Operations of a static network that compute shapes alone, and refuse those that do not fit."""

from collections.abc import Mapping, Sequence

import numpy as np

Shape = tuple[int, ...]


class ShapeOps:
    """A back end of `Ops` whose tensor is a shape; remembers inputs, outputs, names and the weights that were used.

    Args:
        weights: [N, K] of every linear layer, [C, H] of every table, [n] of every vector.
    """

    def __init__(self, weights: Mapping[str, Shape]) -> None:
        self.weights = weights
        self.inputs: dict[str, Shape] = {}
        self.outputs: dict[str, Shape] = {}
        self.made: dict[str, Shape] = {}
        self.operations: dict[str, str] = {}  # by the name of what they made
        self.used: set[str] = set()

    def _make(self, operation: str, name: str, shape: Shape) -> Shape:
        assert name not in self.made, f"{name} is made twice"
        self.made[name], self.operations[name] = shape, operation
        return shape

    def _weight(self, name: str) -> Shape:
        self.used.add(name)
        return self.weights[name]

    def input(self, name: str, shape: Shape) -> Shape:
        assert name not in self.inputs, f"{name} is declared twice"
        self.inputs[name] = shape
        return shape

    def output(self, name: str, tensor: Shape) -> None:
        assert self.made[name] == tensor
        self.outputs[name] = tensor

    def linear(self, name: str, x: Shape, weight: str) -> Shape:
        rows, columns = self._weight(weight)
        assert x[-1] == columns, f"{name}: {x} by {weight} {self.weights[weight]}"
        return self._make("linear", name, (*x[:-1], rows))

    def rms_norm(self, name: str, x: Shape, weight: str | None, epsilon: float) -> Shape:
        assert epsilon > 0
        assert weight is None or self._weight(weight) == x[-1:], name
        return self._make("rms_norm", name, x)

    def _broadcast(self, operation: str, name: str, a: Shape, b: Shape) -> Shape:
        return self._make(operation, name, np.broadcast_shapes(a, b))

    def add(self, name: str, a: Shape, b: Shape) -> Shape:
        return self._broadcast("add", name, a, b)

    def mul(self, name: str, a: Shape, b: Shape) -> Shape:
        return self._broadcast("mul", name, a, b)

    def mask(self, name: str, scores: Shape, mask: Shape) -> Shape:
        assert np.broadcast_shapes(scores, mask) == scores, name
        return self._make("mask", name, scores)

    def scale(self, name: str, x: Shape, factor: float) -> Shape:
        assert factor > 0
        return self._make("scale", name, x)

    def shift(self, name: str, x: Shape, offset: float) -> Shape:
        assert offset > 0
        return self._make("shift", name, x)

    def tanh(self, name: str, x: Shape) -> Shape:
        return self._make("tanh", name, x)

    def softmax(self, name: str, x: Shape) -> Shape:
        return self._make("softmax", name, x)

    def matmul(self, name: str, a: Shape, b: Shape) -> Shape:
        assert a[-1] == b[-2], f"{name}: {a} @ {b}"
        return self._make("matmul", name, (*np.broadcast_shapes(a[:-2], b[:-2]), a[-2], b[-1]))

    def reshape(self, name: str, x: Shape, shape: Shape) -> Shape:
        assert np.prod(x) == np.prod(shape), f"{name}: {x} as {shape}"
        return self._make("reshape", name, shape)

    def transpose(self, name: str, x: Shape, order: Shape) -> Shape:
        assert sorted(order) == list(range(len(x))), name
        return self._make("transpose", name, tuple(x[axis] for axis in order))

    def slice(self, name: str, x: Shape, axis: int, start: int, stop: int) -> Shape:
        assert 0 <= start < stop <= x[axis], name
        return self._make("slice", name, (*x[:axis], stop - start, *x[axis + 1 :]))

    def concat(self, name: str, parts: Sequence[Shape], axis: int) -> Shape:
        first = parts[0]
        assert all(part[:axis] + part[axis + 1 :] == first[:axis] + first[axis + 1 :] for part in parts), name
        return self._make("concat", name, (*first[:axis], sum(part[axis] for part in parts), *first[axis + 1 :]))

    def convert(self, name: str, x: Shape, like: str) -> Shape:
        return self._make("convert", name, x)

    def argmax(self, name: str, x: Shape) -> Shape:
        return self._make("argmax", name, x[:-1])

    def exclude(self, name: str, x: Shape, index: Shape) -> Shape:
        assert index == x[:-1], name
        return self._make("exclude", name, x)

    def lookup(self, name: str, table: str, index: Shape) -> Shape:
        return self._make("lookup", name, (*index, self._weight(table)[1]))
