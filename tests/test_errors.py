"""Errors for users: one line with its next step, and the exit code that each kind ends with."""

import pytest

from hyco_export import errors
from hyco_export.errors import GateError, HycoError, ProtocolError, counted, first_line, interrupt_keeps


def test_an_error_is_its_message_with_the_next_step_behind_it() -> None:
    assert str(HycoError("the value is 3", "set it to 2")) == "the value is 3 (set it to 2)"
    assert str(HycoError("the value is 3")) == "the value is 3"


def test_only_a_gate_that_failed_ends_with_1() -> None:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, HycoError)]
    assert len(kinds) > 8
    assert {kind.exit_code for kind in kinds if kind is not GateError} == {2}
    assert GateError("x").exit_code == 1


def test_a_protocol_error_carries_code_and_wait() -> None:
    error = ProtocolError("rate", "too many calls", "wait", wait_s=1.5)
    assert (error.code, error.wait_s, str(error)) == ("rate", 1.5, "too many calls (wait)")


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("first\nsecond"), "first"),
        (ValueError("\n  padded  \n"), "padded"),
        (ValueError(), "ValueError"),
        (KeyError("name"), "no 'name'"),
        (KeyError("no such key: name"), "no such key: name"),
        (KeyError(), "KeyError"),
    ],
)
def test_the_first_line_of_any_error(error: Exception, line: str) -> None:
    assert first_line(error) == line


def test_a_number_takes_its_noun() -> None:
    assert [counted(number, "prompt") for number in (0, 1, 2000)] == ["0 prompts", "1 prompt", "2,000 prompts"]


def test_an_interrupt_says_what_is_kept_and_other_errors_do_not() -> None:
    with pytest.raises(KeyboardInterrupt) as stopped, interrupt_keeps(lambda: "3 answers are kept"):
        raise KeyboardInterrupt
    assert stopped.value.__notes__ == ["3 answers are kept"]
    with pytest.raises(ValueError, match="x") as failed, interrupt_keeps(lambda: pytest.fail("asked")):
        raise ValueError("x")
    assert not hasattr(failed.value, "__notes__")
