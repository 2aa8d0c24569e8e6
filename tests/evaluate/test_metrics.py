"""Measures over rounds whose answers are known by hand."""

import math

import msgspec
import numpy as np
import pytest

from hyco_export.core.handoff import HandoffSpec, KvShape
from hyco_export.core.keepset import KeepSet
from hyco_export.errors import HycoError
from hyco_export.evaluate.link_costs import link_note
from hyco_export.evaluate.metrics import (
    caveats,
    chain_acceptance,
    down_overhead_bytes,
    measure,
    measure_traffic,
    threshold_stop,
    tokens_by_rule,
    tokens_by_source,
    without_evidence,
)
from hyco_export.evaluate.pictures import median_times
from hyco_export.protocol import wire
from hyco_export.protocol.wire import Evidence, Traffic
from tests.evaluate.synthetic_traces import EMPTY, generation, local_trace, prime_trace, round_trace

KEEPSET = KeepSet(np.arange(60), 128)


def by_depth(rounds):
    return [(a.depth, a.accepted, a.trials) for a in chain_acceptance(rounds)]


def test_mat_counts_the_bonus_and_leaves_prime_out():
    metrics = measure("hyco", [generation(round_trace((0, 1)), round_trace(()))], KEEPSET)
    assert metrics.rounds == 2
    assert metrics.mat == (3 + 1) / 2
    assert metrics.mat_with_prime == (3 + 1 + 1) / 3
    assert metrics.output_tokens == 5


def test_ratios_are_pooled_and_not_averaged():
    long = generation(*[round_trace((0, 1, 2))] * 9, total_ms=900.0, first_token_ms=10.0)
    short = generation(round_trace(()), total_ms=300.0, first_token_ms=30.0)
    metrics = measure("hyco", [long, short], KEEPSET)
    tokens = (1 + 9 * 4) + (1 + 1)
    assert metrics.output_tokens == tokens
    assert metrics.server_ms_per_token == pytest.approx((2 * 7.0 + 10 * 3.0) / tokens)
    assert metrics.delivery_tokens_per_s == pytest.approx(1000 * tokens / 1200.0)
    assert metrics.draft_ms_per_token == pytest.approx(10 * 4.0 / tokens)
    assert metrics.wait_ms_per_round == 6.0
    assert metrics.first_token_ms == 20.0
    assert metrics.mat == (9 * 4 + 1) / 10


def test_disturbed_calls_count_in_token_figures_and_in_no_time():
    primes = (prime_trace(), prime_trace(continue_from=3, lost_ms=5_000.0))
    again = Traffic(60, 400, 9_999, 9_999, repeats=2)
    rounds = (round_trace((0, 1)), round_trace((0,), traffic=again, wait_ms=999.0, draft_ms=99.0, lost_ms=1_005.0))
    traces = [generation(*rounds, primes=primes, total_ms=6_105.0), generation(round_trace((0, 1)), total_ms=50.0)]
    metrics = measure("hyco", traces, KEEPSET)
    assert (metrics.output_tokens, metrics.rounds, metrics.mat) == (11, 3, 8 / 3)
    assert metrics.mat_with_prime == (8 + 2) / (3 + 2)  # the session that was lost is no round of the system's
    assert (metrics.disturbances.reprimes, metrics.disturbances.repeats) == (1, 2)
    assert (metrics.disturbances.calls, metrics.disturbances.ms) == (2, 6_005.0)
    left = 11 - 1 - 2  # tokens
    assert metrics.server_ms_per_token == pytest.approx((2 * 7.0 + 2 * 3.0) / left)
    assert metrics.delivery_tokens_per_s == pytest.approx(1000 * left / 150.0)
    assert metrics.draft_ms_per_token == pytest.approx(2 * 4.0 / left)
    assert (metrics.wait_ms_per_round, metrics.first_token_ms) == (6.0, 20.0)
    assert (metrics.bytes_up.payload_mean, metrics.bytes_up.wire_max) == (60.0, 260)
    assert caveats((metrics,)) == (
        "hyco: 1 primed again, 2 sent again. No figure of time holds these calls (2) and the 6.0 s that they and the "
        "waiting took.",
    )


def test_a_disturbed_first_call_is_no_time_to_a_first_token_and_nothing_may_be_left():
    disturbed = generation(round_trace((0,), lost_ms=50.0), primes=(prime_trace(lost_ms=50.0),), first_token_ms=5_000.0)
    both = measure("hyco", [disturbed, generation(round_trace((0,)), first_token_ms=30.0)], KEEPSET)
    assert both.first_token_ms == 30.0
    alone = measure("hyco", [disturbed], KEEPSET)
    times = (alone.first_token_ms, alone.server_ms_per_token, alone.delivery_tokens_per_s, alone.wait_ms_per_round)
    assert all(map(math.isnan, times)) and alone.mat == 2.0
    assert median_times("hyco", [disturbed]) is None
    assert link_note([[disturbed]]) == "The link was not measured: no call without a disturbance."


def test_cut_and_early_rounds_are_counted():
    rounds = (
        round_trace((0, 1), older_bytes=90),
        round_trace((0, 1), tokens=(10, 11), finished="length"),  # the bonus is missing
    )
    metrics = measure("hyco", [generation(*rounds), generation(round_trace((0,), finished="length"))], KEEPSET)
    assert (metrics.capped_rounds, metrics.early_rounds) == (1, 1)
    assert caveats((metrics,)) == (
        "Rounds cut by the token cap, which count in MAT with what they committed: hyco 1 of 3.",
        "Rounds drafted before the first window was complete: hyco 1 of 3.",
    )


def test_chain_acceptance_is_conditional_on_the_tokens_above():
    rounds = [round_trace((0, 1, 2)), round_trace((0, 4)), round_trace((3, 5)), round_trace(())]
    assert by_depth(rounds) == [(1, 2, 4), (2, 1, 2), (3, 1, 1)]
    assert chain_acceptance(rounds)[1].share == 0.5


def test_an_slm_leaf_below_the_chain_is_not_a_chain_token():
    assert by_depth([round_trace((0, 1, 2, 6))]) == [(1, 1, 1), (2, 1, 1), (3, 1, 1)]
    assert tokens_by_source([round_trace((0, 1, 2, 6))]) == {"chain": 3, "runner-up": 0, "slm": 1, "bonus": 1}


def test_a_chain_the_server_drafted_counts_like_one_that_was_sent():
    rounds = [round_trace((0, 1), drafted=4), round_trace((), drafted=4)]
    assert by_depth(rounds) == [(1, 1, 2), (2, 1, 1), (3, 0, 1)]
    assert tokens_by_source(rounds) == {"chain": 2, "runner-up": 0, "slm": 0, "bonus": 2}


@pytest.mark.parametrize(
    ("accepted", "tokens", "expected"),
    [
        ((0,), (10,), [(1, 1, 1)]),  # chain token 1 was the stop id: depth 2 was never asked
        ((0, 1, 2), (10, 11), [(1, 1, 1), (2, 1, 1)]),  # the cap cut the path inside
        ((3,), (20,), [(1, 0, 1)]),  # a runner-up was the stop id: the chain failed at depth 1
        ((0,), (10, 99), [(1, 1, 1), (2, 0, 1)]),  # the bonus was the stop id: depth 2 was asked and failed
    ],
)
def test_depths_behind_the_end_of_the_answer_are_not_trials(accepted, tokens, expected):
    assert by_depth([round_trace(accepted, tokens=tokens, finished="stop")]) == expected


def test_a_cut_path_has_no_bonus():
    record = round_trace((0, 1, 2), tokens=(10, 11), finished="length", drawn=(True, False, False))
    assert tokens_by_source([record]) == {"chain": 2, "runner-up": 0, "slm": 0, "bonus": 0}
    assert tokens_by_rule([record]) == {"draw": 1, "threshold only": 1}


def test_the_bonus_is_always_a_draw():
    assert tokens_by_rule([round_trace((0, 4), drawn=(True, False))]) == {"draw": 2, "threshold only": 1}


def test_bonus_tokens_outside_the_keep_set_are_misses():
    rounds = [round_trace((0,)), round_trace((), tokens=(7,)), round_trace((6,), tokens=(127, 8))]
    metrics = measure("hyco", [generation(*rounds)], KEEPSET)
    assert metrics.bonus_misses == 1  # 99; the accepted 127 is no bonus
    assert metrics.bonus_miss_share == pytest.approx(1 / 3)


def test_plain_decoding_has_no_chain():
    metrics = measure("plain", [generation(round_trace((), tree=EMPTY))], KEEPSET)
    assert metrics.mat == 1.0
    assert metrics.chain_acceptance == ()


def test_bytes_are_those_of_rounds_only():
    rounds = [
        round_trace((0,), traffic=Traffic(60, 400, 260, 700)),
        round_trace((), traffic=Traffic(80, 200, 300, 500)),
    ]
    metrics = measure("hyco", [generation(*rounds)], KEEPSET)
    assert (metrics.bytes_up.payload_mean, metrics.bytes_up.payload_max, metrics.bytes_up.wire_max) == (70.0, 80, 300)
    assert (metrics.bytes_down.payload_mean, metrics.bytes_down.wire_mean) == (300.0, 600.0)


def test_overhead_down_is_what_the_hand_off_does_not_explain():
    spec = HandoffSpec(8, 16, "post", {"sliding": KvShape(2, 4), "full": KvShape(1, 8)}, {})
    record = round_trace((0, 1), traffic=Traffic(60, 2 * 8 + 3 * 32 + 41, 0, 0))
    assert down_overhead_bytes(record, spec) == 41
    assert down_overhead_bytes(record, None) == 2 * 8 + 3 * 32 + 41
    finishing = round_trace((0,), tokens=(10,), finished="stop", traffic=Traffic(70, 30, 0, 0))  # no hand-off
    traffic = measure_traffic("hyco", [generation(record, finishing)], spec)
    assert (traffic.up_max_bytes, traffic.down_max_bytes, traffic.down_overhead_max_bytes) == (70, 153, 41)


def test_nothing_to_measure_is_said():
    trace = generation(round_trace(()))
    with pytest.raises(HycoError, match="hyco: 0 answers without a round"):
        measure("hyco", [], KEEPSET)
    assert measure("hyco", [trace], KEEPSET).prompts == 1


def test_stops_that_only_the_threshold_took_are_counted():
    by_threshold = round_trace((0, 1), drawn=(True, False), tokens=(10, 11), finished="stop")
    by_draw = round_trace((0, 1), drawn=(False, True), tokens=(10, 11), finished="stop")
    as_bonus = round_trace((0, 1), drawn=(False, False), finished="stop")
    by_cap = round_trace((0, 1), drawn=(False, False), tokens=(10, 11), finished="length")
    assert [threshold_stop(one) for one in (by_threshold, by_draw, as_bonus, by_cap)] == [True, False, False, False]
    assert measure("hyco", [generation(by_threshold), generation(by_draw)], KEEPSET).threshold_stops == 1


def test_what_was_asked_for_as_evidence_is_no_overhead():
    evidence = Evidence([1, 2], [-1, 0], [5, 6, 7], [0.25, 0.5], [0.2, 0.4], [1.5, 1.25, 0.5])
    plain = round_trace((0,), traffic=Traffic(0, 100, 0, 0))
    size = len(wire.encode(evidence)) - 1
    traced = round_trace((0,), traffic=Traffic(0, 100 + size, 0, 0), evidence=evidence)
    assert down_overhead_bytes(traced, None) == down_overhead_bytes(plain, None) == 100


def test_what_the_device_keeps_is_output_and_draft_time_but_no_verified_token():
    rounds = (round_trace((0, 1), kept=(7, 8), draft_ms=0.0), round_trace((), ahead_ms=3.0, reused=4))
    metrics = measure("synera", [generation(*rounds, locals=(local_trace((7, 8)), local_trace((9,))))], KEEPSET)
    assert metrics.output_tokens == 1 + 3 + 3 + 1
    assert metrics.mat == (3 + 1) / 2
    assert (metrics.unverified_tokens, metrics.unverified_share) == (3, 3 / 8)
    assert sum(metrics.tokens_by_rule.values()) == sum(metrics.tokens_by_source.values()) == 4
    assert metrics.draft_ms_per_token == pytest.approx((2 * 2.0 + 0.0 + 4.0 + 3.0) / 8)
    assert metrics.reused_rounds == 1


def test_a_system_without_a_server_has_no_rounds_and_no_bytes():
    metrics = measure("on-device", [generation(primes=(), locals=(local_trace((7, 8, 9)),))], KEEPSET)
    assert math.isnan(metrics.mat) and math.isnan(metrics.wait_ms_per_round) and metrics.rounds == 0
    assert metrics.server_ms_per_token == 0.0 and metrics.unverified_share == 1.0
    assert metrics.bytes_up.payload_max == metrics.bytes_down.wire_max == 0
    assert metrics.delivery_tokens_per_s == 1000 * 3 / 100.0
    with pytest.raises(ValueError, match="no round whose bytes"):
        measure_traffic("on-device", [generation(primes=(), locals=(local_trace((7,)),))], None)


def test_kept_tokens_are_part_of_the_hand_off():
    spec = HandoffSpec(4, 16, "post", {t: KvShape(1, 2) for t in ("sliding", "full")}, {})
    record = round_trace((0,), kept=(7, 8, 9), traffic=Traffic(0, spec.round_bytes + 5 * spec.row_bytes + 11, 0, 0))
    assert down_overhead_bytes(record, spec) == 11


def test_bytes_without_evidence_are_those_of_a_run_that_did_not_ask_for_it():
    evidence = Evidence([10], [-1], [10, 99], [0.5], [0.4], [1.0, 1.0])
    reply = wire.VerifyReply(1, 1, [], [], [99], "", None, 0, 3.0)
    asked = len(wire.encode(msgspec.structs.replace(reply, evidence=evidence)))
    plain = len(wire.encode(reply))
    trace = generation(round_trace((), evidence=evidence, traffic=Traffic(60, asked, 260, asked + 300)))
    (record,) = without_evidence(trace).rounds
    assert (record.traffic, record.evidence) == (Traffic(60, plain, 260, plain + 300), None)
    assert without_evidence(without_evidence(trace)) == without_evidence(trace)
