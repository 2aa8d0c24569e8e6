"""The fuzzer of chat calls, small: every kind of answer is reached, and nothing is the server's own fault."""

import pytest

from tests.endurance.fuzz_chat import fuzz_chat


def test_a_server_survives_mutated_chat_calls() -> None:
    found = fuzz_chat(1_200, seed=4)
    assert {"ok", "stream", "malformed", "unsupported", "value_range", "model_not_found"} <= set(found.codes)
    assert found.codes["ok"] > 100 and found.codes["stream"] > 100
    assert found.growth_mb < 16.0


def test_a_fault_of_the_server_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fuzzer itself: a parameter that is not checked is seen."""
    monkeypatch.setattr("hyco_export.server.chat.chat_request._turn", lambda message, _place: message)
    with pytest.raises(AssertionError):
        fuzz_chat(1_000, seed=4)
