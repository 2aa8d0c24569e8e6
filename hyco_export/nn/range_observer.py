"""Ranges of the tensors of a static network over calibration passes: exact percentiles in little memory.

An observer for `nn.torch_ops`. A static network has the same number of values in every pass, so the number of values
above a percentile is known beforehand: only that many extremes are kept. Knows names and values; no integer grid.
"""

from collections.abc import Mapping

import torch

ROUNDED_DIGITS = 6  # 100 - 99.9 is a little less than 0.1 in binary; counts are whole


class RangeObserver:
    """Low and high percentile of every tensor it is shown.

    Args:
        percentile: p in (50, 100]; ranges are the (100 - p)th and the p-th percentile. 100 gives minimum and maximum.
        passes: how often each tensor will be shown.
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
        """What it has seen so far; another observer of the same settings goes on from it."""
        return {
            f"{side}/{name}": top
            for side, store in (("high", self._highest), ("low", self._lowest))
            for name, top in store.items()
        }

    def restore(self, state: Mapping[str, torch.Tensor]) -> None:
        """Forget everything, and have seen what `state` says."""
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
