"""Values on either side of their limits."""

import pytest

from hyco_export.evaluate.gates import Gate, failed


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
