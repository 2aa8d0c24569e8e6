"""Gates: a measured value beside its limit. Pure; the values come from metrics, losslessness and parity."""

import math
from typing import Literal

import msgspec

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

    def __str__(self) -> str:
        unit = f" {self.unit}" if self.unit else ""
        return f"{self.name} is {self.value:.4g}{unit}, must be {self.direction} {self.limit:.4g}{unit}"


def failed(gates: tuple[Gate, ...]) -> tuple[Gate, ...]:
    """Those on the wrong side of their limit."""
    return tuple(gate for gate in gates if not gate.passed)
