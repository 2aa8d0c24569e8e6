"""Gates: a measured value beside its limit, and which of them a run must pass. Pure; measures nothing itself."""

import math
from collections.abc import Iterator, Sequence
from typing import Literal

import msgspec

from hyco_export.core import recipe
from hyco_export.core.devicespec import HEAD_GRAPH
from hyco_export.evaluate.losslessness import Losslessness
from hyco_export.evaluate.metrics import SystemMetrics, SystemTraffic
from hyco_export.evaluate.parity import FLOAT, GraphParity

Direction = Literal["at least", "at most"]


class Gate(msgspec.Struct, frozen=True):
    """One thing that must hold for the run to pass. A value that could not be measured (NaN) fails."""

    name: str
    value: float
    direction: Direction
    limit: float
    unit: str = ""

    @property
    def passed(self) -> bool:
        if math.isnan(self.value):
            return False
        return self.value >= self.limit if self.direction == "at least" else self.value <= self.limit

    @property
    def value_text(self) -> str:
        """The value with its unit."""
        return "not measured" if math.isnan(self.value) else f"{self.value:.4g} {self.unit}".rstrip()

    @property
    def limit_text(self) -> str:
        """The limit with its direction and unit."""
        return f"{self.direction} {self.limit:.4g} {self.unit}".rstrip()

    def __str__(self) -> str:
        return f"{self.name}: {self.value_text}, must be {self.limit_text}"


def failed(gates: tuple[Gate, ...]) -> tuple[Gate, ...]:
    """Those on the wrong side of their limit."""
    return tuple(gate for gate in gates if not gate.passed)


def run_gates(
    limits: recipe.Gates,
    systems: Sequence[SystemMetrics],
    losslessness: Sequence[Losslessness],
    parity: Sequence[GraphParity],
    traffic: Sequence[SystemTraffic],
) -> tuple[Gate, ...]:
    """Everything a run must hold, in the order of the report."""
    return (
        *(
            Gate(f"greedy texts that differ, {row.system} on {row.backend}", len(row.differences), "at most", 0)
            for row in losslessness
        ),
        *_mat_gates(limits, systems),
        *_parity_gates(limits, parity),
        *_traffic_gates(limits, traffic),
    )


def _mat_gates(limits: recipe.Gates, systems: Sequence[SystemMetrics]) -> Iterator[Gate]:
    """A limit for a system that did not run fails as not measured."""
    measured = {system.system: system.mat for system in systems}
    for name, limit in limits.min_mat.items():
        yield Gate(f"tokens per round (MAT), {name}", measured.get(name, math.nan), "at least", limit)


def _parity_gates(limits: recipe.Gates, parity: Sequence[GraphParity]) -> Iterator[Gate]:
    """Each integer form of a graph against its float network."""
    for row in parity:
        if row.reference == FLOAT:
            limit = limits.min_head_agreement if row.graph == HEAD_GRAPH else limits.min_slm_agreement
            yield Gate(f"{row.graph}: {row.candidate} agrees with {row.reference}", row.agreement, "at least", limit)


def _traffic_gates(limits: recipe.Gates, traffic: Sequence[SystemTraffic]) -> Iterator[Gate]:
    for row in traffic:
        yield Gate(f"largest request, {row.system}", row.up_max_bytes, "at most", limits.max_bytes_up, "B")
    for row in traffic:
        overhead, limit = row.down_overhead_max_bytes, limits.max_bytes_down_overhead
        yield Gate(f"largest reply beyond its hand-off, {row.system}", overhead, "at most", limit, "B")
