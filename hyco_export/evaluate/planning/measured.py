"""Inputs of a plan read from traces: what took how long, how much of each depth was taken, how many bytes went.

Means over undisturbed calls, so that a simulation with them adds up to the measured totals.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path

import msgspec
import numpy as np

from hyco_export.core.numerics import BITS_PER_MBIT, MS_PER_S
from hyco_export.device.systems import SYSTEMS
from hyco_export.errors import HycoError
from hyco_export.evaluate.link_costs import BITS_PER_BYTE, estimate_link
from hyco_export.evaluate.metrics import NIL, SOURCE_NAMES, taken, timed_steps
from hyco_export.evaluate.planning.inputs import (
    DeviceTimes,
    Inputs,
    LinkPoint,
    LinkTimes,
    ServerTimes,
    Shape,
    SystemInput,
    Workload,
    plannable,
    shape_of,
)
from hyco_export.evaluate.traces import read_traces
from hyco_export.protocol import wire
from hyco_export.protocol.trace import GenerationTrace, RoundTrace
from hyco_export.protocol.tree import Source

MOST_HYBRID_PASSES = 2
SPECEDGE_PASSES = (
    "SpecEdge makes four SLM passes a round; for another `drafting.specedge.passes` give `passes` in --inputs"
)
Traces = Mapping[str, Sequence[GenerationTrace]]


def read_folder(folder: Path) -> dict[str, tuple[GenerationTrace, ...]]:
    """Traces by system of a folder of `bench`, `evaluate` or `validate --traces`: those that can be planned.

    Raises:
        HycoError: none is there.
    """
    files = [folder / f"{name}.jsonl" for name, system in SYSTEMS.items() if plannable(system)]
    found = {path.stem: read_traces(path) for path in files if path.is_file() and path.stat().st_size}
    if not found:
        raise HycoError(f"{folder} holds no traces of a system that asks a server", "make some: hyco-export bench")
    return found


def measured_inputs(traces: Traces, baseline: str | None = None) -> Inputs:
    """What a plan reads, from traces by system; `baseline` comes first.

    Raises:
        HycoError: no undisturbed round, or none with a draft of the device.
    """
    order = sorted(traces, key=lambda name: (name != baseline, list(SYSTEMS).index(name)))
    steps = max((record.drafted for one in chain(*traces.values()) for record in one.rounds), default=0) or 4
    budget = max((len(record.tree) for one in chain(*traces.values()) for record in one.rounds), default=0) or 32
    shapes = {name: shape_of(name, SystemInput(), budget, steps) for name in order}
    rounds = {name: timed_steps(traces[name]).rounds for name in order}
    if not all(rounds.values()):
        empty = next(name for name, found in rounds.items() if not found)
        raise HycoError(f"{empty}: no round that nothing disturbed", "measure longer answers, or leave it out")
    server, assumed = server_times(traces, shapes)
    if any(shape.passes > MOST_HYBRID_PASSES for shape in shapes.values()):
        assumed += (SPECEDGE_PASSES,)
    link, beside = measured_link(traces, shapes)
    everything = tuple(chain(*traces.values()))
    return Inputs(
        device=device_times(traces, shapes),
        link=link,
        server=msgspec.structs.replace(server, beside_ms=beside),
        workload=Workload(answer_tokens=max(2, round(np.mean([len(one.tokens) for one in everything])))),
        systems={name: system_input(traces[name]) for name in order},
        budget=budget,
        steps=steps,
        assumed=assumed,
    )


def device_times(traces: Traces, shapes: Mapping[str, Shape]) -> DeviceTimes:
    """Means of head, pass and host over all systems that have them; a system's passes are those of its name.

    Raises:
        HycoError: no system drafts on the device.
    """
    drafted = [(shapes[n], record) for n in traces for record in timed_steps(traces[n]).rounds if shapes[n].passes]
    if not drafted:
        raise HycoError("no system drafts on the device: its times are unknown", "measure one that does, such as hyco")
    heads = [record.head_ms for shape, record in drafted if shape.device_head]
    regular = [(shape, record) for shape, record in drafted if not shape.ahead] or drafted  # a reused tree spares some
    passes = sum(shape.passes for shape, _ in regular)
    timed = [timed_steps(one) for one in traces.values()]
    primes = [prime for one in timed for prime in one.primes]
    return DeviceTimes(
        head_ms=float(np.mean(heads or [0.0])),
        slm_pass_ms=sum(record.slm_ms for _, record in regular) / passes,
        host_ms=max(0.0, sum(r.draft_ms - r.head_ms - r.slm_ms for _, r in regular) / passes),
        commit_ms=float(np.mean([record.commit_ms for one in timed for record in one.rounds])),
        prefill_ms=float(np.mean([prime.prefill_ms for prime in primes] or [0.0])),
    )


def server_times(traces: Traces, shapes: Mapping[str, Shape]) -> tuple[ServerTimes, tuple[str, ...]]:
    """A point [rows, ms] of the systems without the server's head; its steps are what the others take beyond.

    Returns:
        The times, and what had to be assumed.
    """
    plain: dict[int, list[tuple[int, float]]] = {}
    headed: dict[int, list[tuple[int, float]]] = {}
    for name, one in traces.items():
        for record in timed_steps(one).rounds:
            group = headed if shapes[name].server_head else plain
            group.setdefault(shapes[name].rows, []).append((_rows(record), record.server_ms))
    primes = [prime.server_ms for one in traces.values() for prime in timed_steps(one).primes]
    points = {rows: _mean(found) for rows, found in plain.items()}
    both = [rows for rows in headed if rows in plain]
    head_ms = float(np.mean([_mean(headed[rows])[1] - points[rows][1] for rows in both])) if both else 0.0
    head_ms = max(0.0, head_ms)
    for rows, found in headed.items():
        if rows not in plain:
            at, ms = _mean(found)
            points[rows] = (at, max(ms - head_ms, 1e-3))
    assumed: tuple[str, ...] = ()
    if headed and not both:
        assumed = ("the server's head takes no time of its own: no system tells it apart from the pass",)
    curve = tuple(sorted(points.values()))
    return ServerTimes(pass_ms=curve, head_ms=head_ms, prefill_ms=float(np.mean(primes or [0.0]))), assumed


def measured_link(traces: Traces, shapes: Mapping[str, Shape]) -> tuple[LinkTimes, tuple[tuple[float, float], ...]]:
    """The link as calls with the fewest rows saw it, and what calls with more rows wait longer beside their passes.

    Returns:
        One point: mean round trip beside bytes and server, bandwidth where the replies' sizes tell it; and points
        [rows, ms] for `ServerTimes.beside_ms`.

    Raises:
        ValueError: no call that nothing disturbed.
    """
    seen = estimate_link(traces.values()).down_mbit_s
    down = None if np.isnan(seen) else seen
    waits: dict[int, list[tuple[int, float]]] = {}
    for name, one in traces.items():
        if shapes[name].ahead and any(not shape.ahead for shape in shapes.values()):
            continue  # its waits end with a pass
        for call in timed_steps(one).rounds:
            size = call.traffic.wire_down_bytes
            bytes_ms = MS_PER_S * size * BITS_PER_BYTE / (down * BITS_PER_MBIT) if down else 0.0
            waits.setdefault(shapes[name].rows, []).append((_rows(call), call.wait_ms - call.server_ms - bytes_ms))
    points = [_mean(found) for _, found in sorted(waits.items())]
    rtt_ms = max(0.0, points[0][1])
    beside = tuple((rows, max(0.0, ms - rtt_ms)) for rows, ms in points)
    return LinkTimes(name="as measured", points=(LinkPoint(rtt_ms=rtt_ms, down_mbit_s=down),)), beside


def system_input(traces: Sequence[GenerationTrace]) -> SystemInput:
    """Acceptance by depth and source, and bytes as HTTP sent them."""
    rounds = [record for one in traces for record in one.rounds]
    timed = timed_steps(traces)
    per_token, per_round = _line(
        [len(record.tokens) for record in timed.rounds], [_down_bytes(record) for record in timed.rounds]
    )
    acceptance = acceptance_by_depth(rounds)
    return SystemInput(
        acceptance=acceptance,
        mat=None if acceptance else 1.0,  # no draft was ever taken: each round committed its bonus alone
        up_bytes=round(np.mean([record.traffic.wire_up_bytes for record in timed.rounds])),
        down_bytes=round(per_round),
        down_bytes_per_token=per_token,
        first_up_bytes=round(np.mean([prime.traffic.wire_up_bytes for prime in timed.primes] or [0])),
        first_down_bytes=round(np.mean([prime.traffic.wire_down_bytes for prime in timed.primes] or [0])),
        first_token_ms=float(np.mean(timed.first_token_ms)) if timed.first_token_ms else None,
    )


def acceptance_by_depth(rounds: Sequence[RoundTrace]) -> tuple[dict[str, float], ...]:
    """Of the rounds that reached a depth, the share that took a node there, by its source.

    A depth was reached where all above were taken and the round committed a token there: behind a stop id or the
    token cap nobody asked the verifier.
    """
    reached: Counter[int] = Counter()
    took: Counter[tuple[int, str]] = Counter()
    for record in rounds:
        rows = taken(record)
        reached.update(range(1, len(record.tokens) + 1))
        for depth, row in enumerate(rows, 1):
            source = Source.CHAIN if record.drafted else record.tree.sources[row]
            took[depth, SOURCE_NAMES[Source(source)]] += 1
    deepest = max((depth for depth, _ in took), default=0)
    names = SOURCE_NAMES.values()
    return tuple(
        {name: took[depth, name] / reached[depth] for name in names if took[depth, name]}
        for depth in range(1, deepest + 1)
    )


def _rows(record: RoundTrace) -> int:
    """Of the verification pass: root, unverified tokens, nodes sent or drafted there."""
    return 1 + len(record.kept) + len(record.tree) + record.drafted


def _down_bytes(record: RoundTrace) -> int:
    """Of a reply, without the p~ that are sent on request alone."""
    asked = len(wire.encode(record.evidence)) - len(NIL) if record.evidence is not None else 0
    return record.traffic.wire_down_bytes - asked


def _mean(found: Sequence[tuple[int, float]]) -> tuple[float, float]:
    rows, ms = np.mean(np.array(found), axis=0)
    return float(rows), float(ms)


def _line(x: Sequence[int], y: Sequence[int]) -> tuple[float, float]:
    """Slope (never below 0) and intercept (the same) of least squares that keep the mean."""
    if len(set(x)) < 2:
        return 0.0, float(np.mean(y))
    slope = max(0.0, float(np.polyfit(np.array(x, float), np.array(y, float), 1)[0]))
    return slope, max(0.0, float(np.mean(y)) - slope * float(np.mean(x)))
