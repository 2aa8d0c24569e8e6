"""Gates: measured values beside their limits; and greedy losslessness, which most of them are about."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

import msgspec

from hyco_export.core import recipe
from hyco_export.core.device_spec import HEAD_GRAPH
from hyco_export.evaluate.backend_parity import FLOAT, GraphParity
from hyco_export.evaluate.metrics import UNDISTURBED, Disturbances, SystemMetrics, SystemTraffic, disturbances
from hyco_export.protocol.trace import GenerationTrace

NO_TOKEN = -1  # one of the texts ended before the other


class Difference(msgspec.Struct, frozen=True):
    """The first place where a generation leaves the plain one."""

    prompt_id: str
    position: int  # index among the generated tokens
    expected_token: int
    found_token: int


class Losslessness(msgspec.Struct, frozen=True):
    """One system on one back end, greedy, against plain decoding."""

    system: str
    backend: str
    prompts: int
    max_new_tokens: int
    tokens: int  # compared
    mat: float
    differences: tuple[Difference, ...]
    disturbances: Disturbances = UNDISTURBED


def compare_texts(
    system: str,
    backend: str,
    plain: Mapping[str, Sequence[int]],
    traces: Sequence[GenerationTrace],
    max_new_tokens: int,
) -> Losslessness:
    """Compare `traces` with plain[prompt id], the server's own tokens.

    Raises:
        ValueError: nothing to compare, which would prove nothing.
        KeyError: a prompt that was not decoded plainly.
    """
    if not traces:
        raise ValueError(f"no generation of {system} on {backend} to compare")
    rounds = sum(len(trace.rounds) for trace in traces)
    verified = sum(len(record.tokens) for trace in traces for record in trace.rounds)
    found = [difference(trace.prompt_id, plain[trace.prompt_id], trace.tokens) for trace in traces]
    return Losslessness(
        system=system,
        backend=backend,
        prompts=len(traces),
        max_new_tokens=max_new_tokens,
        tokens=sum(len(trace.tokens) for trace in traces),
        mat=verified / rounds if rounds else float("nan"),
        differences=tuple(one for one in found if one is not None),
        disturbances=disturbances(traces),
    )


def difference(prompt_id: str, expected: Sequence[int], found: Sequence[int]) -> Difference | None:
    """The first position at which two token lists differ, an early end included; None when they are equal."""
    for position in range(max(len(expected), len(found))):
        wanted = expected[position] if position < len(expected) else NO_TOKEN
        seen = found[position] if position < len(found) else NO_TOKEN
        if wanted != seen:
            return Difference(prompt_id, position, wanted, seen)
    return None


Direction = Literal["at least", "at most"]


class Gate(msgspec.Struct, frozen=True):
    """A measured value and its limit. A value that could not be measured (NaN) fails."""

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
    """The gates whose value is on the wrong side of the limit."""
    return tuple(gate for gate in gates if not gate.passed)


def run_gates(
    limits: recipe.Gates,
    systems: Sequence[SystemMetrics],
    losslessness: Sequence[Losslessness],
    parity: Sequence[GraphParity],
    traffic: Sequence[SystemTraffic],
) -> tuple[Gate, ...]:
    """All gates of a run, in the order of the report."""
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
