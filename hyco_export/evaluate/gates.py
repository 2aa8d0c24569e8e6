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
