"""Distributions of a source's times and bytes by system: percentiles, not means alone."""

from collections.abc import Callable, Mapping, Sequence

import msgspec
import numpy as np

from hyco_export.evaluate.metrics import evidence_bytes, timed_steps
from hyco_export.evaluate.page.sources import Source
from hyco_export.evaluate.page.tables import SYSTEM, Column, Table, number, text
from hyco_export.protocol.trace import GenerationTrace, RoundTrace

PERCENTILES = (10, 50, 90, 99)


class Measure(msgspec.Struct, frozen=True):
    """What is distributed. `of` takes a system's generations; calls that an outage disturbed are in no time."""

    name: str
    unit: str
    digits: int
    of: Callable[[Sequence[GenerationTrace]], list[float]]


class Distribution(msgspec.Struct, frozen=True):
    """A measure's values by system; systems without one are left out."""

    measure: Measure
    values: Mapping[str, np.ndarray]


def _of_rounds(value: Callable[[RoundTrace], float]) -> Callable[[Sequence[GenerationTrace]], list[float]]:
    return lambda traces: [value(record) for record in timed_steps(traces).rounds]


MEASURES = (
    Measure("a round from draft to commit", "ms", 1, _of_rounds(lambda r: r.draft_ms + r.wait_ms + r.commit_ms)),
    Measure("the server's time of a round", "ms", 2, _of_rounds(lambda record: record.server_ms)),
    Measure("the device's draft of a round", "ms", 2, _of_rounds(lambda record: record.draft_ms + record.ahead_ms)),
    Measure("time to first token", "ms", 1, lambda traces: list(timed_steps(traces).first_token_ms)),
    Measure("a round's reply, body", "B", 0, _of_rounds(lambda r: r.traffic.payload_down_bytes - evidence_bytes(r))),
    Measure("a round's request, body", "B", 0, _of_rounds(lambda record: record.traffic.payload_up_bytes)),
    Measure("tokens of a round", "tokens", 0, _of_rounds(lambda record: len(record.tokens))),
)


def distributions(source: Source) -> tuple[Distribution, ...]:
    """Every measure that varies in at least one system."""
    asking = [system.system for system in source.systems if system.rounds and system.system in source.traces]
    found = []
    for measure in MEASURES:
        values = {name: np.array(measure.of(source.traces[name]), dtype=np.float64) for name in asking}
        values = {name: one for name, one in values.items() if one.size}
        if any(one.max() > 0 for one in values.values()):
            found.append(Distribution(measure, values))
    return tuple(found)


def percentile_table(distribution: Distribution) -> Table:
    """One row a system: how many, mean, percentiles, largest."""
    measure = distribution.measure
    columns = ("count", "mean", *(f"p{one}" for one in PERCENTILES), "largest")
    rows = (
        (
            text(name),
            number(values.size, 0),
            number(float(values.mean()), measure.digits),
            *(number(float(one), measure.digits) for one in np.percentile(values, PERCENTILES)),
            number(float(values.max()), measure.digits),
        )
        for name, values in distribution.values.items()
    )
    units = (Column(label, "" if label == "count" else measure.unit) for label in columns)
    return Table(f"{measure.name}, {measure.unit}", (SYSTEM, *units), tuple(rows))
