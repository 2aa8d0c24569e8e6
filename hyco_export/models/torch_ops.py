"""The torch back end of static networks (`core.network.blocks.Ops`) in float32, and an observer of ranges for
calibration.
"""

from collections.abc import Callable, Mapping, Sequence

import torch

from hyco_export.core.estimates.shapes import HELD_VALUES
from hyco_export.core.network.weights import IntegerMatrix, PackedMatrices, PackedMatrix, Weights

Observer = Callable[[str, torch.Tensor], None]
PRODUCT_ROWS = 512  # of a packed matrix at a time: its float32 block stays in the processor's cache


def ignore(name: str, values: torch.Tensor) -> None:
    """The observer that does nothing."""


class TorchWeights:
    """Weights of all passes: float32 tensors, dequantised once, or packed integers where those would be too large.

    Args:
        weights: linear layers given as `PackedMatrices` of more than `held_values` values are dequantised at every use.
    """

    def __init__(self, weights: Weights, held_values: int = HELD_VALUES) -> None:
        matrices = weights.matrices
        self._packed: PackedMatrices | None = None
        if isinstance(matrices, PackedMatrices) and matrices.value_count > held_values:
            self._packed, matrices = matrices, {}
        self.matrices = {
            name: torch.from_numpy(matrix.real() if isinstance(matrix, IntegerMatrix) else matrix)
            for name, matrix in matrices.items()
        }
        self.vectors = {name: torch.from_numpy(vector) for name, vector in weights.vectors.items()}
        self.tables = {
            name: (torch.from_numpy(table.integers), torch.from_numpy(table.scales), table.zero_point)
            for name, table in weights.tables.items()
        }

    @property
    def value_count(self) -> int:
        """Weights of all linear layers."""
        held = sum(matrix.numel() for matrix in self.matrices.values())
        return held + (self._packed.value_count if self._packed is not None else 0)

    def product(self, x: torch.Tensor, weight: str) -> torch.Tensor:
        """x [R, K] times the transposed matrix [N, K]: [R, N]."""
        if self._packed is None:
            return x @ self.matrices[weight].T
        return packed_product(x, self._packed.packed(weight))


def packed_product(x: torch.Tensor, matrix: PackedMatrix) -> torch.Tensor:
    """x [R, K] times a packed matrix transposed: [R, N], one block of its rows at a time.

    A byte holds 8 / bits neighbouring columns. They are not unpacked into one matrix: the columns at each place of the
    bytes are multiplied by the columns of x at the same place, and the products are added up.
    """
    stored, per_byte = torch.from_numpy(matrix.integers), 8 // matrix.bits
    places = [x[:, place::per_byte].contiguous() for place in range(per_byte)]  # [R, columns at this place] each
    result = torch.empty(len(x), len(stored))
    for start in range(0, len(stored), PRODUCT_ROWS):
        block = stored[start : start + PRODUCT_ROWS]
        parts = [part @ _at_place(block, place, matrix.bits)[:, : part.shape[1]].T for place, part in enumerate(places)]
        result[:, start : start + PRODUCT_ROWS] = sum(parts[1:], start=parts[0])
    return result.mul_(torch.from_numpy(matrix.scales))


def _at_place(block: torch.Tensor, place: int, bits: int) -> torch.Tensor:
    """float32 [rows, bytes]: the values at one place of each byte."""
    if bits == 8:
        return block.float()
    unsigned = (block >> (place * bits)) & (2**bits - 1)
    return unsigned.to(torch.int8).sub_(2 ** (bits - 1)).float()


class TorchOps:
    """One pass of a network in float32.

    Args:
        weights: from `TorchWeights`.
        feeds: real values of every input, float32.
        observe: called with name and values of every tensor that needs a calibrated range.
    """

    def __init__(self, weights: TorchWeights, feeds: Mapping[str, torch.Tensor], observe: Observer = ignore) -> None:
        self._weights = weights
        self._feeds = feeds
        self._observe = observe
        self.outputs: dict[str, torch.Tensor] = {}

    def _seen(self, name: str, values: torch.Tensor) -> torch.Tensor:
        self._observe(name, values)
        return values

    def input(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        values = self._feeds[name]
        if tuple(values.shape) != shape:
            raise ValueError(f"input {name} has shape {tuple(values.shape)}, the network takes {shape}")
        return self._seen(name, values)

    def output(self, name: str, tensor: torch.Tensor) -> None:
        self.outputs[name] = tensor

    def linear(self, name: str, x: torch.Tensor, weight: str) -> torch.Tensor:
        return self._seen(name, self._weights.product(x, weight))

    def rms_norm(self, name: str, x: torch.Tensor, weight: str | None, epsilon: float) -> torch.Tensor:
        normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + epsilon)
        return self._seen(name, normed if weight is None else normed * self._weights.vectors[weight])

    def add(self, name: str, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return self._seen(name, a + b)

    def mul(self, name: str, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return self._seen(name, a * b)

    def weigh(self, name: str, x: torch.Tensor, weight: str) -> torch.Tensor:
        return self._seen(name, x * self._weights.vectors[weight])

    def scale(self, name: str, x: torch.Tensor, factor: float) -> torch.Tensor:
        return self._seen(name, x * factor)

    def shift(self, name: str, x: torch.Tensor, offset: float) -> torch.Tensor:
        return self._seen(name, x + offset)

    def tanh(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x)

    def softmax(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x, dim=-1)

    def mask(self, name: str, scores: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return scores + mask

    def matmul(self, name: str, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return self._seen(name, a @ b)

    def reshape(self, name: str, x: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        return x.reshape(shape)

    def transpose(self, name: str, x: torch.Tensor, order: tuple[int, ...]) -> torch.Tensor:
        return x.permute(order)

    def slice(self, name: str, x: torch.Tensor, axis: int, start: int, stop: int) -> torch.Tensor:
        return x.narrow(axis, start, stop - start)

    def columns(self, name: str, x: torch.Tensor, index: Sequence[int]) -> torch.Tensor:
        return x[:, list(index)]

    def concat(self, name: str, parts: Sequence[torch.Tensor], axis: int) -> torch.Tensor:
        return torch.cat(list(parts), dim=axis)

    def convert(self, name: str, x: torch.Tensor, like: str) -> torch.Tensor:
        return self._seen(name, x)

    def argmax(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return x.argmax(dim=-1).to(torch.int32)

    def exclude(self, name: str, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return x.scatter(-1, index.long()[:, None], float("-inf"))  # one index per row

    def lookup(self, name: str, table: str, index: torch.Tensor) -> torch.Tensor:
        integers, scales, zero_point = self._weights.tables[table]
        rows = (integers[index.long()].float() - zero_point) * scales[index.long()][:, None]
        return self._seen(name, rows)


# ---- ranges over calibration passes: exact percentiles in little memory

ROUNDED_DIGITS = 6  # 100 - 99.9 is a little less than 0.1 in binary; counts are whole


class RangeObserver:
    """Low and high percentile of every tensor that it is called with.

    Args:
        percentile: p in (50, 100]; ranges are the (100 - p)th and the p-th percentile. 100 gives minimum and maximum.
        passes: how often it will be called with each tensor.
        symmetric: percentile of |x| for tensors that need a range around 0 instead, by name.
    """

    def __init__(self, percentile: float, passes: int, symmetric: dict[str, float] | None = None) -> None:
        self._percentile = percentile
        self._passes = passes
        self._symmetric = symmetric or {}
        self._highest: dict[str, torch.Tensor] = {}
        self._lowest: dict[str, torch.Tensor] = {}

    def __call__(self, name: str, values: torch.Tensor) -> None:
        flat = values.detach().reshape(-1).float()
        if name in self._symmetric:
            self._keep(self._highest, name, flat.abs(), self._symmetric[name])
            return
        self._keep(self._highest, name, flat, self._percentile)
        self._keep(self._lowest, name, -flat, self._percentile)

    def ranges(self) -> dict[str, tuple[float, float]]:
        """(low, high) by name; (-m, m) for symmetric ones."""
        found = {}
        for name, top in self._highest.items():
            high = float(top.min())
            found[name] = (-high, high) if name in self._symmetric else (-float(self._lowest[name].min()), high)
        return found

    def state(self) -> dict[str, torch.Tensor]:
        """The observer's state, from which another one with the same settings can continue."""
        return {
            f"{side}/{name}": top
            for side, store in (("high", self._highest), ("low", self._lowest))
            for name, top in store.items()
        }

    def restore(self, state: Mapping[str, torch.Tensor]) -> None:
        """Continue from a state."""
        stores: dict[str, dict[str, torch.Tensor]] = {"high": {}, "low": {}}
        for key, top in state.items():
            side, _, name = key.partition("/")
            stores[side][name] = top
        self._highest, self._lowest = stores["high"], stores["low"]

    def _keep(self, store: dict[str, torch.Tensor], name: str, flat: torch.Tensor, percentile: float) -> None:
        # at most the share 1 - p of all values lies above the smallest of the `count` greatest
        above = (100.0 - percentile) * flat.numel() * self._passes / 100.0
        count = int(round(above, ROUNDED_DIGITS)) + 1
        pool = torch.cat([store[name], flat]) if name in store else flat
        store[name] = pool.topk(min(count, pool.numel()), sorted=False).values
