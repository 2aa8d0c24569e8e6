"""Token-for-token comparison."""

import pytest

from hyco_export.evaluate.gates import NO_TOKEN, Difference, compare_texts, difference
from tests.evaluate.synthetic_traces import generation, round_trace


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
