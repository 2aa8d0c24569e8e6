"""Refusals: every code has a status, what travels with it, and what an error without a code becomes."""

import re
from pathlib import Path

import pytest

from hyco_export.errors import HycoError, ProtocolError, RecipeError
from hyco_export.protocol import refusals, wire

PACKAGE = Path(refusals.__file__).parents[1]
RAISED = re.compile(r'ProtocolError\(\s*"([a-z_]+)"')
CHAPTER = "## 7"  # of PROTOCOL.md


def test_every_code_that_the_server_raises_has_a_status() -> None:
    files = [*(PACKAGE / "server").rglob("*.py"), PACKAGE / "protocol" / "tree.py", PACKAGE / "protocol" / "wire.py"]
    raised = {code for path in files for code in RAISED.findall(path.read_text(encoding="utf-8"))}
    assert len(raised) > 15
    assert raised <= set(refusals.STATUS_OF)
    assert all(400 <= status < 600 for status in refusals.STATUS_OF.values())


def test_the_protocols_table_has_these_codes_and_statuses() -> None:
    text = (PACKAGE / "protocol" / "PROTOCOL.md").read_text(encoding="utf-8")
    chapter = text.partition(CHAPTER)[2]
    assert chapter
    for code, status in refusals.STATUS_OF.items():
        assert f"| `{code}` | {status} |" in chapter, code


def test_an_unknown_code_has_no_status() -> None:
    with pytest.raises(KeyError):
        refusals.status_of(ProtocolError("nonsense", "x"))


def test_a_refusal_survives_the_wire() -> None:
    sent = ProtocolError("cache_full", "no room for 40 rows", "try again")
    found = refusals.refused(wire.encode(refusals.body_of(sent)))
    assert (found.code, found.message, found.hint) == (sent.code, sent.message, sent.hint)


@pytest.mark.parametrize(("wait_s", "seconds"), [(0.2, 1), (1.0, 1), (2.1, 3)])
def test_a_wait_is_told_in_whole_seconds_never_too_short(wait_s: float, seconds: int) -> None:
    refusal = ProtocolError("rate", "too many calls", wait_s=wait_s)
    assert refusals.headers_of(refusal) == {"Retry-After": str(seconds)}
    assert refusals.body_of(refusal).retry_after_s == seconds


def test_who_is_not_let_in_learns_how_to_authenticate() -> None:
    assert refusals.headers_of(ProtocolError("unauthorized", "x")) == {"WWW-Authenticate": "Bearer"}
    assert refusals.headers_of(ProtocolError("malformed", "x")) == {}


def test_an_error_without_a_code_is_the_models_fault() -> None:
    own = ProtocolError("tree_size", "x")
    assert refusals.as_refusal(own) is own
    other = refusals.as_refusal(RecipeError("broken", "mend it"))
    assert (other.code, other.message, other.hint) == ("model_fault", "broken", "mend it")
    assert refusals.status_of(refusals.as_refusal(HycoError("x", "y"))) == 500


def test_a_callers_word_is_quoted_and_cut() -> None:
    assert refusals.shown("a'b\n") == repr("a'b\n")
    assert refusals.shown("x" * 100) == repr("x" * refusals.SHOWN_CHARACTERS)
