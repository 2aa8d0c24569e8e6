"""The side of the final norm is told by the values, and by what the head predicts; the wrong one is refused by name."""

from dataclasses import replace

import pytest
import torch

from hyco_export.errors import GateError
from hyco_export.models.capture import teacher_forced
from hyco_export.models.head.norm_side import Readings, compare_readings, require_reading, require_side, side_of
from hyco_export.models.head.unroll import final_norm, head_spans, response_rows, unroll
from tests.support import builders

VOCAB = 60
LENGTH = 40


@pytest.fixture(scope="module")
def verifier():
    return builders.small_verifier(VOCAB)


def captures(verifier, side):
    return [teacher_forced(verifier, builders.random_ids(LENGTH, VOCAB, seed), 4, side) for seed in range(3)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_tell_the_side(dtype):
    model = builders.small_verifier(VOCAB).to(dtype)
    for side in ("pre", "post"):
        for capture in captures(model, side):
            assert side_of(capture.h, final_norm(model)) == side


def test_a_norm_with_zeros_tells_the_side(verifier):
    model = builders.small_verifier(VOCAB)
    model.model.norm.weight[5] = 0.0
    assert side_of(captures(model, "pre")[0].h, final_norm(model)) == "pre"
    norm = final_norm(model)
    states = torch.randn(64, len(norm.weight), generator=torch.Generator().manual_seed(2))
    told = norm.weight != 0
    unit = states / states[:, told].square().mean(dim=-1, keepdim=True).sqrt()
    assert side_of(unit * norm.weight, norm) == "post"


def test_states_from_the_other_side_are_refused_with_the_cause(verifier):
    states = captures(verifier, "pre")[0].h
    require_side(states, final_norm(verifier), "pre")
    with pytest.raises(GateError, match=r"come from before the verifier's final norm, .*hidden_norm is post") as caught:
        require_side(states, final_norm(verifier), "post")
    assert caught.value.hint.startswith("set $.models.hidden_norm: pre")


def readings_of_rows(verifier):
    """Raw and normed rows whose answers are what a head predicts from the normed ones."""
    head, norm = builders.small_head(VOCAB), final_norm(verifier)
    spans = head_spans(head.config)
    raw = [response_rows(capture, spans, 1000) for capture in captures(verifier, "pre")]
    normed = [response_rows(capture, spans, 1000, norm) for capture in captures(verifier, "pre")]
    answers = [unroll(head, rows, 1)[0].argmax(dim=-1) for rows in normed]
    raw, normed = (
        [replace(rows, answers=told) for rows, told in zip(side, answers, strict=True)] for side in (raw, normed)
    )
    return head, raw, normed


def test_the_reading_that_predicts_the_verifier_passes_and_the_other_is_refused(verifier):
    head, raw, normed = readings_of_rows(verifier)
    right = compare_readings(head, normed, raw)
    assert right.own == 1.0
    assert right.sigmas < 0
    require_reading(right, "pre")

    wrong = compare_readings(head, raw, normed)
    assert (wrong.own, wrong.other) == (right.other, right.own)
    with pytest.raises(GateError, match="different sides of the verifier's final norm") as caught:
        require_reading(wrong, "post")
    assert "and 100.0% reading it as pre" in caught.value.message
    assert caught.value.hint.startswith("set $.models.hidden_norm: pre")


@pytest.mark.parametrize("readings", [Readings(0.86, 0.87, 5.0), Readings(0.5, 0.7, 2.0), Readings(0.9, 0.1, -9.0)])
def test_a_small_or_uncertain_lead_is_no_reason_to_refuse(readings):
    require_reading(readings, "post")
