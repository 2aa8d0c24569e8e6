"""The fuzzer, small: every kind of refusal is reached, nothing is the server's own fault, memory and sessions stay."""

import pytest

from hyco_export.protocol import wire
from hyco_export.protocol.refusals import STATUS_OF
from tests.endurance.fuzz import fuzz_calls, fuzz_http
from tests.endurance.mutation import OTHERS, Mutator

EVERYWHERE = {
    "ok", "malformed", "version", "tree_shape", "tree_size", "token_range", "parent_order", "duplicate_sibling",
    "round_stale", "round_future", "length_differs", "digest_differs", "value_range", "unsupported",
}  # fmt: skip


def test_calls_survive_mutated_bodies() -> None:
    found = fuzz_calls(6_000, seed=3)
    assert found.bodies == 6_000
    assert EVERYWHERE | {"head_mismatch", "round_differs", "session_finished"} <= set(found.codes)
    assert found.codes["malformed"] < 0.7 * found.bodies  # most of the rest reach behind the decoder
    assert max(found.statuses) < 500
    assert found.growth_mb < 16.0


def test_a_server_survives_mutated_bodies_paths_and_headers() -> None:
    found = fuzz_http(800, seed=5)
    assert {"ok", "malformed", "unknown_route", "method", "value_range", "token_range"} <= set(found.codes)
    assert max(found.statuses) < 500
    assert found.growth_mb < 16.0


def test_a_fault_of_the_server_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fuzzer itself: a rule that is not checked is seen."""
    monkeypatch.setattr("hyco_export.server.admission._check_values", lambda _request: None)
    with pytest.raises(AssertionError):
        fuzz_calls(5_000, seed=5)
    monkeypatch.undo()
    monkeypatch.setitem(STATUS_OF, "malformed", 500)
    with pytest.raises(AssertionError, match="malformed"):
        fuzz_http(50, seed=5)


def test_mutations_are_repeatable_and_stay_encodable() -> None:
    message = wire.VerifyRequest(1, 5, b"12345678", [1, 2, 3], [-1, 0, 1])
    left, right = Mutator(7), Mutator(7)
    bodies = [left.body(message) for _ in range(500)]
    assert bodies == [right.body(message) for _ in range(500)]
    assert len(set(bodies)) > 300
    lists = [value for value in (left._value(None) for _ in range(300)) if isinstance(value, list)]
    assert lists and not any(value is other for value in lists for other in OTHERS)  # later changes stay in one body
