"""Values on either side of their limits."""

import math

import pytest

from hyco_export.core import recipe
from hyco_export.core.device_spec import HEAD_GRAPH, SLM_TREE_GRAPH
from hyco_export.evaluate.backend_parity import GraphParity
from hyco_export.evaluate.gates import (
    NO_TOKEN,
    Difference,
    Gate,
    Losslessness,
    compare_texts,
    difference,
    failed,
    run_gates,
)
from hyco_export.evaluate.metrics import SystemTraffic
from tests.evaluate.synthetic_reports import synthetic_report
from tests.evaluate.synthetic_traces import generation, round_trace


@pytest.mark.parametrize(
    ("value", "direction", "limit", "passed"),
    [
        (300.0, "at most", 300.0, True),
        (301.0, "at most", 300.0, False),
        (0.97, "at least", 0.97, True),
        (0.969, "at least", 0.97, False),
        (float("nan"), "at least", 0.0, False),
        (float("nan"), "at most", 0.0, False),
    ],
)
def test_a_limit_itself_passes_and_an_unknown_value_fails(value, direction, limit, passed):
    gate = Gate("a value", value, direction, limit)
    assert gate.passed is passed
    assert (gate in failed((gate,))) is not passed


def test_a_gate_says_name_value_and_limit():
    assert (
        str(Gate("bytes up a round", 312.0, "at most", 300.0, "B")) == "bytes up a round: 312 B, must be at most 300 B"
    )
    assert str(Gate("MAT of hyco", float("nan"), "at least", 1.8)) == "MAT of hyco: not measured, must be at least 1.8"


LIMITS = recipe.Gates(min_mat={"hyco": 2.0, "absent": 1.0}, min_head_agreement=0.97, min_slm_agreement=0.9)


def gates_by_name(**changes):
    parts = {"systems": (), "losslessness": (), "parity": (), "traffic": ()}
    return {gate.name: gate for gate in run_gates(LIMITS, **{**parts, **changes})}


def test_every_differing_text_fails_the_run():
    rows = [
        Losslessness("hyco-exact", "torch", 30, 64, 1920, 2.6, ()),
        Losslessness("hyco-exact", "qnn", 4, 32, 128, 2.6, (Difference("p", 3, 1, 2),)),
    ]
    gates = gates_by_name(losslessness=rows)
    assert gates["greedy texts that differ, hyco-exact on torch"].passed
    assert not gates["greedy texts that differ, hyco-exact on qnn"].passed


def test_mat_is_gated_by_system_and_an_absent_system_fails():
    gates = gates_by_name(systems=synthetic_report().systems)
    assert gates["tokens per round (MAT), hyco"].passed
    assert math.isnan(gates["tokens per round (MAT), absent"].value)
    assert not gates["tokens per round (MAT), absent"].passed


def test_integer_graphs_are_gated_against_the_float_network_only():
    rows = [
        GraphParity(HEAD_GRAPH, "torch", "onnx-cpu", 10, 0.98),
        GraphParity(HEAD_GRAPH, "torch", "qnn", 10, 0.96),
        GraphParity(SLM_TREE_GRAPH, "torch", "qnn", 10, 0.91),
        GraphParity(SLM_TREE_GRAPH, "onnx-cpu", "qnn", 10, 0.5),
    ]
    gates = gates_by_name(parity=rows)
    assert [gates[f"{HEAD_GRAPH}: {name} agrees with torch"].passed for name in ("onnx-cpu", "qnn")] == [True, False]
    assert gates[f"{SLM_TREE_GRAPH}: qnn agrees with torch"].passed
    assert len(gates) == len(LIMITS.min_mat) + 3


def test_traffic_is_gated_in_both_directions():
    gates = gates_by_name(traffic=[SystemTraffic("hyco", 300, 9000, 101)])
    assert gates["largest request, hyco"].passed
    assert not gates["largest reply beyond its hand-off, hyco"].passed


# Token-for-token comparison.


@pytest.mark.parametrize(
    ("expected", "found", "position", "tokens"),
    [
        ([1, 2, 3], [1, 9, 3], 1, (2, 9)),
        ([1, 2, 3], [1, 2], 2, (3, NO_TOKEN)),
        ([1, 2], [1, 2, 3], 2, (NO_TOKEN, 3)),
        ([], [4], 0, (NO_TOKEN, 4)),
    ],
)
def test_the_first_difference_is_found(expected, found, position, tokens):
    assert difference("p", expected, found) == Difference("p", position, *tokens)


def test_equal_texts_have_none():
    assert difference("p", [1, 2], (1, 2)) is None


def test_a_system_is_compared_prompt_by_prompt():
    traces = [generation(round_trace((0, 1)), prompt_id="a"), generation(round_trace(()), prompt_id="b")]
    result = compare_texts("hyco-exact", "onnx-cpu", {"a": [1, 10, 11, 99], "b": [1, 98]}, traces, 64)
    assert result.differences == (Difference("b", 1, 98, 99),)
    assert (result.prompts, result.tokens, result.mat) == (2, 6, 2.0)


def test_comparing_nothing_is_refused():
    with pytest.raises(ValueError, match="no generation of hyco-exact on qnn"):
        compare_texts("hyco-exact", "qnn", {}, [], 64)
