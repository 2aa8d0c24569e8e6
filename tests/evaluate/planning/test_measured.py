"""Inputs read from traces whose times are written down by hand, and a plan of them beside the traces' own figures."""

from pathlib import Path

import msgspec
import numpy as np
import pytest

from hyco_export.core.keepset import KeepSet
from hyco_export.errors import HycoError
from hyco_export.evaluate.metrics import measure
from hyco_export.evaluate.planning.measured import acceptance_by_depth, measured_inputs, read_folder
from hyco_export.evaluate.planning.simulation import Options, simulate
from hyco_export.evaluate.traces import write_traces
from hyco_export.protocol.wire import Traffic
from tests.evaluate.synthetic_traces import generation, prime_trace, round_trace

KEEPSET = KeepSet(np.arange(60), 128)
ROUND = {"head_ms": 20.0, "slm_ms": 10.0, "draft_ms": 36.0, "commit_ms": 2.0}  # 6 ms of the host
CLOUD = {"head_ms": 0.0, "slm_ms": 0.0, "draft_ms": 0.0, "commit_ms": 2.0}


def hyco(name: str = "hyco"):
    """Three rounds: a chain node and an SLM leaf, three chain nodes, nothing; 8 rows each."""
    rounds = [
        round_trace((3, 5), number=1, wait_ms=62.0, server_ms=22.0, **ROUND),
        round_trace((0, 1, 2), number=2, wait_ms=62.0, server_ms=22.0, **ROUND),
        round_trace((), number=3, wait_ms=62.0, server_ms=22.0, **ROUND),
    ]
    primes = (prime_trace(server_ms=7.0),)
    total_ms = 9.0 + 5.0 + 3 * (36.0 + 62.0) + 2 * 2.0
    return generation(*rounds, system=name, primes=primes, total_ms=total_ms, first_token_ms=9.0)


def cloud_mtp():
    """Two rounds of a chain of four on the server, all taken and none: 5 rows."""
    rounds = [
        round_trace((0, 1, 2, 3), drafted=4, number=1, wait_ms=53.0, server_ms=13.0, **CLOUD),
        round_trace((), drafted=4, number=2, wait_ms=53.0, server_ms=13.0, **CLOUD),
    ]
    total_ms = 9.0 + 5.0 + 2 * 53.0 + 2.0
    return generation(*rounds, system="cloud-mtp", total_ms=total_ms, first_token_ms=9.0)


def server_head():
    """The tree of eight rows with the server's head: 5 ms more than without."""
    device = {"head_ms": 0.0, "slm_ms": 10.0, "draft_ms": 16.0, "commit_ms": 2.0}
    rounds = [round_trace((0, 1), number=1, wait_ms=67.0, server_ms=27.0, **device)]
    return generation(*rounds, system="hyco-server-head", total_ms=9.0 + 5.0 + 83.0, first_token_ms=9.0)


def test_acceptance_is_counted_where_a_depth_was_reached() -> None:
    found = acceptance_by_depth(hyco().rounds)
    assert found == (
        {"chain": pytest.approx(1 / 3), "runner-up": pytest.approx(1 / 3)},
        {"chain": pytest.approx(1 / 2), "slm": pytest.approx(1 / 2)},
        {"chain": pytest.approx(1 / 2)},
    )
    cut = round_trace((0, 1), tokens=(10, 11), finished="length")
    assert acceptance_by_depth([cut]) == ({"chain": 1.0}, {"chain": 1.0})  # nobody asked about depth 3
    assert acceptance_by_depth(cloud_mtp().rounds)[0] == {"chain": 0.5}


def test_times_are_taken_apart() -> None:
    inputs = measured_inputs(
        {"hyco": [hyco()], "cloud-mtp": [cloud_mtp()], "hyco-server-head": [server_head()]}, "cloud-mtp"
    )
    assert next(iter(inputs.systems)) == "cloud-mtp"
    assert (inputs.steps, inputs.budget) == (4, 7)
    device = inputs.device
    assert (device.head_ms, device.slm_pass_ms, device.host_ms, device.commit_ms) == pytest.approx((20, 10, 6, 2))
    assert device.prefill_ms == 5.0
    assert inputs.server.head_ms == pytest.approx(5.0)
    assert inputs.server.pass_ms == ((5.0, pytest.approx(8.0)), (8.0, pytest.approx(22.0)))
    assert inputs.server.prefill_ms == 7.0
    point = inputs.link.points[0]
    assert (point.rtt_ms, point.down_mbit_s) == (pytest.approx(40.0), None)  # larger replies did not take longer
    assert inputs.server.beside_ms == ((5.0, 0.0), (8.0, pytest.approx(0.0)))
    assert inputs.systems["hyco"].first_token_ms == 9.0
    assert inputs.assumed == ()
    without = measured_inputs({"hyco": [hyco()], "cloud-mtp": [cloud_mtp()]})
    assert without.server.pass_ms[0] == (5.0, pytest.approx(13.0))
    assert "takes no time of its own" in without.assumed[0]


def test_a_plan_of_traces_gives_their_figures() -> None:
    """Replies of one size, so that the link is a round trip; MAT, g, delivery and drafting within the draws' noise."""
    even = Traffic(60, 400, 260, 700)
    rounds = [
        round_trace(rows, number=number, wait_ms=62.0, server_ms=22.0, traffic=even, **ROUND)
        for number, rows in enumerate([(0, 1, 2), (0,), (3, 5), (0, 1), ()] * 8, 1)
    ]
    primes = (msgspec.structs.replace(prime_trace(server_ms=7.0), traffic=even, wait_ms=47.0),)
    total_ms = 47.0 + 5.0 + len(rounds) * 98.0 + (len(rounds) - 1) * 2.0
    trace = generation(*rounds, primes=primes, total_ms=total_ms, first_token_ms=47.0)
    seen = measure("hyco", [trace], KEEPSET)
    planned = simulate(measured_inputs({"hyco": [trace]}), Options(answers=80))[0]
    assert planned.mat == pytest.approx(seen.mat, rel=0.03)
    assert planned.server_ms_per_token == pytest.approx(seen.server_ms_per_token, rel=0.03)
    assert planned.tokens_per_s == pytest.approx(seen.delivery_tokens_per_s, rel=0.03)
    assert planned.draft_ms_per_token == pytest.approx(seen.draft_ms_per_token, rel=0.03)
    assert planned.first_token_ms == pytest.approx(seen.first_token_ms)


def test_folders_are_read_by_system(tmp_path: Path) -> None:
    write_traces(tmp_path / "hyco.jsonl", [hyco()])
    write_traces(tmp_path / "synera.jsonl", [hyco("synera")])  # commits unasked: not planned
    (tmp_path / "cloud-mtp.jsonl").touch()  # a benchmark that was stopped before
    assert list(read_folder(tmp_path)) == ["hyco"]
    with pytest.raises(HycoError, match="holds no traces"):
        read_folder(tmp_path / "nowhere")


def test_traces_that_tell_too_little_are_refused() -> None:
    with pytest.raises(HycoError, match="no system drafts on the device"):
        measured_inputs({"cloud-mtp": [cloud_mtp()]})
    with pytest.raises(HycoError, match="no round that nothing disturbed"):
        measured_inputs({"hyco": [generation(round_trace((), lost_ms=5.0))]})


def test_calls_with_more_rows_may_wait_longer_beside_their_pass() -> None:
    """Seven milliseconds that the server's host works, in no pass and in no link."""
    slow = [msgspec.structs.replace(record, wait_ms=69.0) for record in hyco().rounds]
    traces = {"hyco": [msgspec.structs.replace(hyco(), rounds=tuple(slow))], "cloud-mtp": [cloud_mtp()]}
    inputs = measured_inputs(traces)
    assert inputs.link.points[0].rtt_ms == pytest.approx(40.0)
    assert inputs.server.beside_ms == ((5.0, 0.0), (8.0, pytest.approx(7.0)))
    assert inputs.server.late_ms(33) == pytest.approx(7.0 + 25 * 7.0 / 3)


def test_a_system_whose_drafts_were_never_taken_commits_its_bonus_alone() -> None:
    rounds = [round_trace((), drafted=4, number=number, wait_ms=53.0, server_ms=13.0, **CLOUD) for number in (1, 2)]
    unlucky = generation(*rounds, system="cloud-mtp", total_ms=122.0, first_token_ms=9.0)
    inputs = measured_inputs({"cloud-mtp": (unlucky,), "hyco": (hyco(),)}, "cloud-mtp")
    assert not inputs.systems["cloud-mtp"].acceptance
    mats = {outcome.system: outcome.mat for outcome in simulate(inputs, Options(answers=20))}
    assert mats["cloud-mtp"] == pytest.approx(1.0) and mats["hyco"] > 1.2
