"""Generations recomputed with the graphs' times on a real device in place of this machine's.

A trace says how long head and SLM took here, over however many passes. Both are scaled by what one pass takes on the
device (`core.device_profile`) and here, on the saved inputs. What the host does besides, waits and the server's time
stay as they were measured.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np

from hyco_export.core.artifact import HEAD, HEAD_SAMPLES_FILE, SLM, SLM_SAMPLES_FILE
from hyco_export.core.device_profile import DeviceProfile
from hyco_export.core.device_spec import HEAD_GRAPH, SLM_TREE_GRAPH, GraphSession
from hyco_export.core.golden import read_samples
from hyco_export.core.numerics import MS_PER_S
from hyco_export.device.backends import Backend
from hyco_export.protocol.trace import GenerationTrace, LocalTrace, RoundTrace

Step = TypeVar("Step", RoundTrace, LocalTrace)
TIMED_RUNS = 5  # of one pass on this machine, after one that warms up


class Scale(msgspec.Struct, frozen=True):
    """Device time of a pass over its time here."""

    head: float
    slm: float


def scale_to(profile: DeviceProfile, backend: Backend, run: Path, target: str) -> Scale:
    """Measure a pass of both graphs here; the profile has the device's."""
    with closing(backend.head(run, target)) as head:
        head_ms = pass_ms(head, read_samples(run / HEAD / HEAD_SAMPLES_FILE)[HEAD_GRAPH])
    tree, prefill = backend.slm(run, target)
    with closing(tree), closing(prefill):
        slm_ms = pass_ms(tree, read_samples(run / SLM / SLM_SAMPLES_FILE)[SLM_TREE_GRAPH])
    return Scale(profile.pass_ms(HEAD_GRAPH) / head_ms, profile.pass_ms(SLM_TREE_GRAPH) / slm_ms)


def pass_ms(
    session: GraphSession, feeds: Sequence[Mapping[str, np.ndarray]], clock: Callable[[], float] = time.perf_counter
) -> float:
    """Median of a few runs."""
    session.run(feeds[0])
    taken = []
    for number in range(TIMED_RUNS):
        started = clock()
        session.run(feeds[number % len(feeds)])
        taken.append((clock() - started) * MS_PER_S)
    return statistics.median(taken)


def on_device(trace: GenerationTrace, scale: Scale) -> GenerationTrace:
    """The generation with the device's times of head and SLM, and a total that is shorter or longer by the change."""
    rounds = tuple(_scaled(record, scale) for record in trace.rounds)
    steps = tuple(_scaled(record, scale) for record in trace.locals)
    before = sum(one.draft_ms for one in trace.rounds) + sum(one.draft_ms for one in trace.locals)
    change = sum(one.draft_ms for one in rounds) + sum(one.draft_ms for one in steps) - before
    return msgspec.structs.replace(trace, rounds=rounds, locals=steps, total_ms=trace.total_ms + change)


def _scaled(record: Step, scale: Scale) -> Step:
    head_ms, slm_ms = record.head_ms * scale.head, record.slm_ms * scale.slm
    host_ms = max(0.0, record.draft_ms - record.head_ms - record.slm_ms)
    draft_ms = host_ms + head_ms + slm_ms if record.draft_ms else 0.0
    return msgspec.structs.replace(record, head_ms=head_ms, slm_ms=slm_ms, draft_ms=draft_ms)
