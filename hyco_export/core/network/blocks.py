"""The operation set of static networks (`Ops`), and the blocks head and SLM share, written in it alone.

A backend of `Ops` computes the operations (torch) or writes them into a graph (ONNX). Blocks: rotary embedding,
grouped-query attention, gated MLP, soft-cap.

Legend: R rows of a pass, A query heads, N kv heads, d head dim, C keys (ring slots + rows), H hidden.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import pi, sqrt
from typing import Literal, Protocol, TypeVar

T = TypeVar("T")
Activation = Literal["gelu", "silu"]  # of a gated MLP; gelu in its tanh form

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

    def weigh(self, name: str, x: T, weight: str) -> T:
        """x [.., n] times the vector `weight` [n]."""
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

    def columns(self, name: str, x: T, index: Sequence[int]) -> T:
        """x [R, n] -> [R, len(index)]: these columns, some of them several times."""
        ...

    def concat(self, name: str, parts: Sequence[T], axis: int) -> T:
        """Parts must have one encoding: `convert` them first."""
        ...

    def convert(self, name: str, x: T, like: str) -> T:
        """The same real values in the encoding of the tensor `like` (a name): requantised, unchanged in float."""
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


GELU_LINEAR = sqrt(2.0 / pi)  # tanh form of GELU: 0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))
GELU_CUBIC = 0.044715 * GELU_LINEAR
FLAT = 6.0  # |tanh(x)| beyond it is 1 to within half a 16-bit step over [-1, 1]: 1.2e-5 < 1.5e-5
GELU_FLAT_SQUARE = 18.0  # x^2 from which GELU's argument exceeds FLAT: sqrt(18) (0.798 + 0.0357 * 18) = 6.1


@dataclass(frozen=True)
class AttentionShape:
    """Sizes of one attention layer. `heads` is A and a multiple of `kv_heads` = N; `dim` is d."""

    rows: int
    heads: int
    kv_heads: int
    dim: int

    @property
    def group(self) -> int:
        """Query heads that read one kv head."""
        return self.heads // self.kv_heads


def rotate(ops: Ops[T], name: str, x: T, cos: T, sin: T, shape: tuple[int, int, int]) -> T:
    """Rotary embedding of x [R, n, d] = `shape`, cos and sin [R, 1, d] with the sign of rotate-half inside sin.

    transformers' `apply_rotary_pos_emb`: x cos + (-x2, x1) sin; here the halves only swap and the host stored -sin in
    the first half.
    """
    half = shape[2] // 2
    first = ops.slice(f"{name}.first", x, 2, 0, half)
    second = ops.slice(f"{name}.second", x, 2, half, shape[2])
    swapped = ops.concat(f"{name}.swapped", [second, first], 2)
    return ops.add(name, ops.mul(f"{name}.cos", x, cos), ops.mul(f"{name}.sin", swapped, sin))


def heads_first(ops: Ops[T], name: str, x: T, rows: int, heads: int, inner: tuple[int, ...]) -> T:
    """[rows, heads, *inner] -> [heads, rows, *inner]; a plain reshape where one of the two is 1."""
    if rows == 1 or heads == 1:
        return ops.reshape(name, x, (heads, rows, *inner))
    return ops.transpose(name, x, (1, 0, *range(2, 2 + len(inner))))


def attend(ops: Ops[T], name: str, query: T, keys: T, values: T, mask: T, shape: AttentionShape, width: int) -> T:
    """Grouped-query attention without repeated keys, scale 1.0: another factor is inside the query.

    Args:
        query: [R, A, d], normed and rotated.
        keys: [N, d, C], transposed once for all layers that share them.
        values: [N, C, d].
        mask: [R, C] = 0 or the hidden value.
        width: C.

    Returns:
        [R, A * d].
    """
    rows, kv, group, dim = shape.rows, shape.kv_heads, shape.group, shape.dim
    grouped = ops.reshape(f"{name}.grouped", query, (rows, kv, group, dim))
    flat = ops.reshape(
        f"{name}.query",
        heads_first(ops, f"{name}.by_head", grouped, rows, kv, (group, dim)),
        (kv, rows * group, dim),
    )
    scores = ops.matmul(f"{name}.scores", flat, keys)  # [N, R*group, C]
    scores = ops.reshape(f"{name}.scores_4d", scores, (kv, rows, group, width))
    visible = ops.mask(f"{name}.masked", scores, ops.reshape(f"{name}.mask", mask, (1, rows, 1, width)))
    shares = ops.softmax(f"{name}.shares", visible)
    shares = ops.reshape(f"{name}.shares_3d", shares, (kv, rows * group, width))
    mixed = ops.matmul(f"{name}.mixed", shares, values)  # [N, R*group, d]
    mixed = ops.reshape(f"{name}.mixed_4d", mixed, (kv, rows, group, dim))
    back = heads_first(ops, f"{name}.by_row", mixed, kv, rows, (group, dim))
    return ops.reshape(f"{name}.joined", back, (rows, shape.heads * dim))


def gelu(ops: Ops[T], name: str, x: T) -> T:
    """Tanh form of GELU in elementary operations: 0.5 x (1 + tanh(x (c2 + c1 x^2))). Native Gelu costs 20 dB on HTP."""
    square = ops.mul(f"{name}.square", x, x)
    slope = ops.shift(f"{name}.slope", ops.scale(f"{name}.cubic", square, GELU_CUBIC), GELU_LINEAR)
    gate = ops.shift(f"{name}.gate", ops.tanh(f"{name}.tanh", ops.mul(f"{name}.argument", x, slope)), 1.0)
    return ops.mul(name, ops.scale(f"{name}.half", x, 0.5), gate)


def silu(ops: Ops[T], name: str, x: T) -> T:
    """x sigmoid(x) as h (1 + tanh h) with h = x / 2: the operations of `gelu`, which HTP computes in 16 bits."""
    half = ops.scale(f"{name}.half", x, 0.5)
    gate = ops.shift(f"{name}.gate", ops.tanh(f"{name}.tanh", half), 1.0)
    return ops.mul(name, half, gate)


def gated_mlp(ops: Ops[T], name: str, x: T, weights: str | None = None, activation: Activation = "gelu") -> T:
    """down(activation(gate x) * up x): [R, H] -> [R, H].

    Weights: `{weights}.gate_proj`, `.up_proj`, `.down_proj`; `weights` is `name` unless one layer runs several times.
    """
    weights = name if weights is None else weights
    gate = ops.linear(f"{name}.gate", x, f"{weights}.gate_proj")
    gate = (silu if activation == "silu" else gelu)(ops, f"{name}.{activation}", gate)
    up = ops.linear(f"{name}.up", x, f"{weights}.up_proj")
    return ops.linear(f"{name}.down", ops.mul(f"{name}.gated", gate, up), f"{weights}.down_proj")


def soft_cap(ops: Ops[T], name: str, x: T, cap: float) -> T:
    """cap * tanh(x / cap)."""
    return ops.scale(name, ops.tanh(f"{name}.tanh", ops.scale(f"{name}.over_cap", x, 1.0 / cap)), cap)


Ranges = Mapping[str, tuple[float, float]]

_FLAT_RANGES = {
    "square": (0.0, GELU_FLAT_SQUARE),
    "cubic": (0.0, GELU_CUBIC * GELU_FLAT_SQUARE),
    "slope": (0.0, GELU_LINEAR + GELU_CUBIC * GELU_FLAT_SQUARE),
    "argument": (-FLAT, FLAT),
    "over_cap": (-FLAT, FLAT),
}
"""By the last part of a name in `gelu` and `soft_cap`: ranges outside which tanh is flat."""


def only_feeds_tanh(name: str) -> bool:
    """Whether a tensor only feeds tanh, so that clipping it where tanh is flat changes nothing."""
    return name.rpartition(".")[2] in _FLAT_RANGES


def cut_where_flat(ranges: Ranges) -> dict[str, tuple[float, float]]:
    """Ranges, with those of tensors that only feed tanh cut to where it is not flat.

    A few large gates (x = 50 gives an argument of 4,500) would otherwise take all resolution from the small ones.
    """
    cut = dict(ranges)
    for name, (low, high) in ranges.items():
        if only_feeds_tanh(name):
            least, most = _FLAT_RANGES[name.rpartition(".")[2]]
            cut[name] = (max(low, least), min(high, most))
    return cut
