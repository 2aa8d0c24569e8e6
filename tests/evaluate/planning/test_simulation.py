"""The simulation against totals worked out apart from it: sums of parts, saturated servers, renewal theory."""

import msgspec
import pytest

from hyco_export.errors import HycoError
from hyco_export.evaluate.planning.inputs import DeviceTimes, LinkPoint, LinkTimes, Workload
from hyco_export.evaluate.planning.simulation import Options, Simulation, simulate
from tests.evaluate.planning.scripted_inputs import scripted_inputs, taken

ONE = Options(answers=3)


def test_one_client_takes_the_sum_of_its_parts() -> None:
    """Five rounds of four tokens behind PRIME's one; every figure from the parts alone."""
    hyco = taken(3, up_bytes=0, down_bytes=2000, down_bytes_per_token=500.0, first_down_bytes=6000, first_up_bytes=100)
    outcome = Simulation("hyco", scripted_inputs({"hyco": hyco}), ONE).run()
    first = 40.0 + 30.0 + 6.0  # round trip, prefill, 6,000 bytes
    draft = 20.0 + 10.0 + 5.0
    round_ms = draft + 40.0 + 22.0 + 4.0  # round trip, 33 rows, 2,000 + 4 * 500 bytes
    answer = first + 2.0 + 5 * round_ms + 4 * 1.0  # the device's prefill; a commit between rounds
    assert (outcome.tokens, outcome.rounds, outcome.mat) == (63, 15, 4.0)
    assert outcome.first_token_ms == pytest.approx(first)
    assert outcome.tokens_per_s == pytest.approx(21 / answer * 1000)
    assert outcome.server_ms_per_token == pytest.approx((30.0 + 5 * 22.0) / 21)
    assert outcome.draft_ms_per_token == pytest.approx(5 * draft / 21)
    assert outcome.bytes_per_token == pytest.approx((6100 + 5 * 4000) / 21)
    assert outcome.server_busy == pytest.approx(140.0 / answer)
    assert outcome.tokens_by_source == {"chain": 45, "bonus": 15}


def test_a_head_on_the_server_is_paid_there() -> None:
    """With every pass; its first chain comes with PRIME's reply where replies bring chains."""
    systems = {"cloud-mtp": taken(4), "hyco-server-head": taken(3)}
    cloud, brings = simulate(scripted_inputs(systems), ONE)
    assert cloud.server_ms_per_token == pytest.approx((30.0 + 4 * (8.0 + 5.0)) / 21)  # 5 rows take 8 ms
    assert cloud.draft_ms_per_token == 0.0
    assert brings.server_ms_per_token == pytest.approx((35.0 + 5 * (22.0 + 5.0)) / 21)
    assert brings.draft_ms_per_token == pytest.approx(5 * 15.0 / 21)


def test_tokens_a_round_follow_the_shares_by_depth() -> None:
    """MAT is 1 + s1 + s1 s2 + ...: the probability to reach each depth, summed."""
    inputs = scripted_inputs({"hyco": taken(5, 0.8)}, answer_tokens=2000)
    outcome = Simulation("hyco", inputs, Options(answers=10)).run()
    assert outcome.mat == pytest.approx(sum(0.8**depth for depth in range(6)), rel=0.02)
    assert 0 <= outcome.rounds - outcome.tokens_by_source["bonus"] <= 10  # an answer's last round may be cut


def test_an_answer_is_cut_at_its_length() -> None:
    outcome = Simulation("hyco", scripted_inputs({"hyco": taken(5)}, answer_tokens=9), ONE).run()
    assert (outcome.tokens, outcome.rounds) == (27, 6)  # 1 + 6 + 2: the last round loses four
    assert outcome.tokens_by_source == {"chain": 3 * 7, "bonus": 3}


@pytest.mark.parametrize(("batch", "cycle_ms"), [(8, 22.0 + (22.0 + 6 * 33 * 0.5)), (1, 8 * 22.0)])
def test_a_saturated_server_is_shared(batch: int, cycle_ms: float) -> None:
    """Eight clients without link or drafting are never anywhere but at the server.

    It does not wait for calls: the first one goes alone, then the seven that came meanwhile, and so on.
    """
    at_once = DeviceTimes(head_ms=0.0, slm_pass_ms=0.0)
    inputs = scripted_inputs({"hyco": taken(3)}, rtt_ms=0.0, device=at_once, answer_tokens=401)
    inputs = msgspec.structs.replace(inputs, server=msgspec.structs.replace(inputs.server, prefill_ms=0.0))
    outcome = Simulation("hyco", inputs, Options(clients=8, batch=batch, answers=2)).run()
    assert outcome.server_ms_per_token == pytest.approx(cycle_ms / (8 * 4), rel=0.01)
    assert outcome.tokens_per_s == pytest.approx(4 / cycle_ms * 1000, rel=0.01)
    assert outcome.server_busy == pytest.approx(1.0)


@pytest.mark.parametrize(("between", "late_ms"), [(True, 75.0), (False, 75.0)])
def test_passes_ahead_end_with_the_pass_that_runs(between: bool, late_ms: float) -> None:
    """A wait of 62 ms holds passes of 15 ms up to 75; five are also all that there are."""
    device = DeviceTimes(head_ms=0.0, slm_pass_ms=15.0, looks_between_passes=between)
    inputs = scripted_inputs({"specedge-pd": taken(3)}, device=device)
    outcome = Simulation("specedge-pd", inputs, ONE).run()
    answer = 70.0 + 5 * (4 * 15.0 + late_ms)
    assert outcome.tokens_per_s == pytest.approx(21 / answer * 1000)
    assert outcome.draft_ms_per_token == pytest.approx(5 * 9 * 15.0 / 21)


def test_a_device_that_looks_between_passes_stops_with_the_reply() -> None:
    device = DeviceTimes(head_ms=0.0, slm_pass_ms=30.0)
    inputs = scripted_inputs({"specedge-pd": taken(3)}, device=device)
    stops = Simulation("specedge-pd", inputs, ONE).run()
    assert stops.tokens_per_s == pytest.approx(21 / (70.0 + 5 * (120.0 + 90.0)) * 1000)  # 62 ms of wait: three passes
    stays = msgspec.structs.replace(inputs, device=msgspec.structs.replace(device, looks_between_passes=False))
    assert Simulation("specedge-pd", stays, ONE).run().tokens_per_s == pytest.approx(
        21 / (70.0 + 5 * (120.0 + 150.0)) * 1000
    )


def test_a_link_over_time_is_read_at_the_time_of_the_call() -> None:
    points = (LinkPoint(from_s=0.0, rtt_ms=40.0), LinkPoint(from_s=0.1, rtt_ms=400.0))
    inputs = scripted_inputs({"hyco": taken(3)}, answer_tokens=5)
    inputs = msgspec.structs.replace(inputs, link=LinkTimes(name="two", points=points))
    outcome = Simulation("hyco", inputs, Options(answers=1)).run()
    # PRIME at 0: 20 up, 30, 20 down; drafted by 107: 200 up in the second point, 22; at 329 the series is in its
    # second round of .2 s: 329 is .129 of it
    assert outcome.tokens_per_s == pytest.approx(5 / (70.0 + 2.0 + 35.0 + 200.0 + 22.0 + 200.0) * 1000)


def test_what_a_call_waits_beside_its_pass_is_no_server_time() -> None:
    inputs = scripted_inputs({"hyco": taken(3)})
    server = msgspec.structs.replace(inputs.server, beside_ms=((5.0, 0.0), (33.0, 14.0)))
    late = Simulation("hyco", msgspec.structs.replace(inputs, server=server), ONE).run()
    plain = Simulation("hyco", inputs, ONE).run()
    assert late.server_ms_per_token == plain.server_ms_per_token
    assert 21_000 / late.tokens_per_s == pytest.approx(21_000 / plain.tokens_per_s + 5 * 14.0)


def test_a_first_token_that_was_seen_replaces_link_and_bytes() -> None:
    inputs = scripted_inputs({"hyco": taken(3, first_down_bytes=6000)})
    seen = msgspec.structs.replace(inputs, workload=Workload(answer_tokens=21, first_token_ms=800.0))
    assert Simulation("hyco", seen, ONE).run().first_token_ms == pytest.approx(800.0)


def test_the_same_seed_gives_the_same_plan() -> None:
    inputs = scripted_inputs({"hyco": taken(5, 0.7), "hyco-exact": taken(5, 0.6)})
    jitter = msgspec.structs.replace(inputs, link=msgspec.structs.replace(inputs.link, jitter_ms=5.0, loss=0.01))
    assert simulate(jitter, ONE) == simulate(jitter, ONE)
    assert simulate(jitter, ONE) != simulate(jitter, msgspec.structs.replace(ONE, seed=7))


@pytest.mark.parametrize(
    ("options", "value", "step"),
    [
        (Options(clients=99_999_999_999), "--clients 99,999,999,999 is above 1,000", "give fewer"),
        (Options(clients=1_001, answers=1), "--clients 1,001 is above 1,000", "give fewer"),
        (Options(clients=10, answers=10**9), "at most 10,000,000 are simulated", "give --answers 47619"),
    ],
)
def test_what_would_not_end_is_refused_before_it_begins(options: Options, value: str, step: str) -> None:
    with pytest.raises(HycoError) as caught:
        simulate(scripted_inputs({"hyco": taken(3)}), options)
    assert value in caught.value.message
    assert caught.value.hint == step
