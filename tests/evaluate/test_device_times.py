"""A device's times in place of this machine's: head and SLM are scaled, the rest stays."""

import numpy as np
import pytest

from hyco_export.core.keepset import KeepSet
from hyco_export.evaluate.device_times import TIMED_RUNS, Scale, on_device, pass_ms
from hyco_export.evaluate.metrics import measure
from tests.evaluate.synthetic_traces import generation, local_trace, round_trace

KEEPSET = KeepSet(np.arange(60), 128)


def test_head_and_slm_are_scaled_and_the_host_is_not() -> None:
    trace = generation(round_trace((0,)), round_trace((0, 1), draft_ms=0.0, head_ms=0.0, slm_ms=0.0))
    found = on_device(trace, Scale(head=2.0, slm=0.5))
    first, rest = found.rounds
    assert (first.head_ms, first.slm_ms, first.draft_ms) == (2.0, 1.0, 4.0)  # 1 ms of the host's own
    assert (rest.head_ms, rest.slm_ms, rest.draft_ms) == (0.0, 0.0, 0.0)
    assert found.total_ms == trace.total_ms + 0.0
    slower = on_device(trace, Scale(head=1.0, slm=11.0))
    assert slower.rounds[0].draft_ms == 24.0 and slower.total_ms == trace.total_ms + 20.0
    assert [one.wait_ms for one in slower.rounds] == [one.wait_ms for one in trace.rounds]
    assert slower.first_token_ms == trace.first_token_ms


def test_figures_follow() -> None:
    trace = generation(round_trace((0,)), locals=(local_trace((5, 6)),))
    here, there = (measure("hyco", [one], KEEPSET) for one in (trace, on_device(trace, Scale(10.0, 10.0))))
    assert there.draft_ms_per_token > here.draft_ms_per_token
    assert there.delivery_tokens_per_s < here.delivery_tokens_per_s
    assert there.server_ms_per_token == here.server_ms_per_token and there.mat == here.mat


def test_a_pass_is_the_median_of_warm_runs() -> None:
    class Session:
        runs = 0

        def run(self, feeds):
            self.runs += 1
            return {}

        def close(self) -> None: ...

    ticks = iter([0.0, 0.001, 1.0, 1.003, 2.0, 2.002, 3.0, 3.100, 4.0, 4.002])
    session = Session()
    assert pass_ms(session, [{}, {}], lambda: next(ticks)) == pytest.approx(2.0)
    assert session.runs == TIMED_RUNS + 1
