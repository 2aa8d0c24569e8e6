"""What each linear layer's low width costs a head, and which layers to give 8 bits first.

Two measures of a layer, both KL from the original head to a changed one, the mean over K depths in nats per token:
`kl_alone`, when this layer alone is quantised; `kl_gain`, by how much it falls when all layers are quantised and this
one has 8 bits. Both are measured on the weights of the clip search, before training.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from hyco_export.core.estimates.shapes import PACKED_ROWS
from hyco_export.core.network.weights import IntegerMatrix
from hyco_export.core.numerics import decibels
from hyco_export.models.families.gemma4_assistant import HeadModel
from hyco_export.models.head.qat import divergences, packs
from hyco_export.models.head.quantisers import linear_layers, linear_weights, load_weight
from hyco_export.models.head.unroll import RootRows, unroll


@dataclass(frozen=True)
class LayerCost:
    """One linear layer by module name. `extra_bytes`: more bytes with 8 bits; `sqnr_db`: of the quantised weight."""

    name: str
    bits: int
    stored_bytes: int
    extra_bytes: int
    sqnr_db: float
    kl_alone: float
    kl_gain: float


@dataclass(frozen=True)
class _Tally:
    """Sums of nats, and tokens, by depth [K], of one changed head."""

    nats: np.ndarray
    counts: np.ndarray

    @property
    def mean(self) -> float:
        return float(np.mean(self.nats[self.counts > 0] / self.counts[self.counts > 0]))


@torch.no_grad()
def layer_costs(
    teacher: HeadModel,
    student: HeadModel,
    narrow: Mapping[str, IntegerMatrix],
    wide: Mapping[str, IntegerMatrix],
    sequences: Sequence[RootRows],
    steps: int,
    report: Callable[[int, int], None],
) -> list[LayerCost]:
    """Costs of all layers, in the head's order.

    Args:
        teacher: the original head.
        student: a float one, output layer untied; left with the narrow weights.
        narrow, wide: the original weights in their present width and in 8 bits.
        sequences: what the divergence is measured on.
        report: called with done and total passes.
    """
    layers = dict(linear_layers(student))
    weights = linear_weights(teacher)
    names = ["", *layers]  # "": all layers in integers
    alone = {name: _Tally(np.zeros(steps), np.zeros(steps)) for name in layers}
    raised = {name: _Tally(np.zeros(steps), np.zeros(steps)) for name in names}
    packed = list(packs(sequences, PACKED_ROWS))
    for done, rows in enumerate(packed, 1):
        wanted = unroll(teacher, rows, steps)
        _load(layers, weights)
        for name, layer in layers.items():
            load_weight(layer, _real(narrow[name]))
            _count(alone[name], wanted, unroll(student, rows, steps))
            load_weight(layer, weights[name])
        _load(layers, {name: _real(narrow[name]) for name in layers})
        _count(raised[""], wanted, unroll(student, rows, steps))
        for name, layer in layers.items():
            load_weight(layer, _real(wide[name]))
            _count(raised[name], wanted, unroll(student, rows, steps))
            load_weight(layer, _real(narrow[name]))
        report(done, len(packed))
    return [
        LayerCost(
            name=name,
            bits=narrow[name].bits,
            stored_bytes=narrow[name].stored_bytes,
            extra_bytes=wide[name].stored_bytes - narrow[name].stored_bytes,
            sqnr_db=weight_sqnr_db(weights[name], narrow[name]),
            kl_alone=alone[name].mean,
            kl_gain=raised[""].mean - raised[name].mean,
        )
        for name in layers
    ]


def weight_sqnr_db(weight: torch.Tensor, matrix: IntegerMatrix) -> float:
    """SQNR in dB of a weight [N, K] in integers."""
    exact = weight.detach().double()
    noise = float((exact - _real(matrix).to(exact)).square().sum())
    signal = float(exact.square().sum())
    return decibels(signal, noise)


def by_gain_per_byte(costs: Iterable[LayerCost]) -> list[LayerCost]:
    """Layers that gain by 8 bits, the largest gain per byte first."""
    helped = [cost for cost in costs if cost.kl_gain > 0 and cost.extra_bytes > 0]
    return sorted(helped, key=lambda cost: cost.kl_gain / cost.extra_bytes, reverse=True)


def prefix_sizes(count: int) -> list[int]:
    """How many of the first layers are tried together: 1, 2, 4, ... and all of them."""
    sizes = [2**power for power in range(count.bit_length()) if 2**power < count]
    return [*sizes, count] if count else []


def _load(layers: Mapping[str, nn.Linear], weights: Mapping[str, torch.Tensor]) -> None:
    for name, layer in layers.items():
        load_weight(layer, weights[name])


def _real(matrix: IntegerMatrix) -> torch.Tensor:
    return torch.from_numpy(matrix.real())


def _count(tally: _Tally, wanted: Sequence[torch.Tensor], given: Sequence[torch.Tensor]) -> None:
    for depth, (left, right) in enumerate(zip(wanted, given, strict=True)):
        tally.nats[depth] += float(divergences(left, right).sum())
        tally.counts[depth] += len(left)
