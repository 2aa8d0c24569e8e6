"""Tokens: where they come from, what is refused, that comparing takes no short cut and nothing repeats them."""

import hmac
from pathlib import Path
from types import SimpleNamespace

import pytest

from hyco_export.errors import ProtocolError, ServerError
from hyco_export.protocol import security as module
from hyco_export.protocol.security import ANYBODY, Tokens, read_tokens

ALICE, BOB = "alice-0123456789abcdef", "bob-0123456789abcdefgh"


def token_file(folder: Path, text: str, mode: int = 0o600) -> Path:
    path = folder / "tokens"
    path.write_text(text)
    path.chmod(mode)
    return path


def test_without_tokens_everybody_is_anybody() -> None:
    assert Tokens().owner_of(None) == Tokens().owner_of("Bearer x") == ANYBODY
    assert not Tokens()


def test_owners_differ_and_do_not_hold_their_token() -> None:
    tokens = Tokens([ALICE, BOB])
    alice, bob = tokens.owner_of(f"Bearer {ALICE}"), tokens.owner_of(f"bearer  {BOB}")
    assert alice != bob and ANYBODY not in (alice, bob)
    assert ALICE not in repr(vars(tokens)) and alice not in ALICE


@pytest.mark.parametrize(
    "header", [None, "", ALICE, f"Basic {ALICE}", "Bearer", "Bearer ", f"Bearer {ALICE}x", f"Bearer {ALICE[:-1]}", "é"]
)
def test_anything_else_is_unauthorized_and_not_repeated(header: str | None) -> None:
    with pytest.raises(ProtocolError) as refusal:
        Tokens([ALICE, BOB]).owner_of(header)
    assert refusal.value.code == "unauthorized"
    assert ALICE[:-1] not in str(refusal.value)


def test_every_known_token_is_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[bytes, bytes]] = []

    def spy(left: bytes, right: bytes) -> bool:
        compared.append((left, right))
        return hmac.compare_digest(left, right)

    monkeypatch.setattr(module, "hmac", SimpleNamespace(compare_digest=spy))
    Tokens([ALICE, BOB]).owner_of(f"Bearer {ALICE}")
    assert len(compared) == 2  # the first match ends nothing
    assert {len(side) for pair in compared for side in pair} == {32}


def test_tokens_of_a_file(tmp_path: Path) -> None:
    path = token_file(tmp_path, f"# phones\n{ALICE}\n\n  {BOB}  # the lab\n")
    assert read_tokens(path, {"HYCO_TOKEN": "c" * 20}) == (ALICE, BOB)


def test_the_variable_is_read_without_a_file() -> None:
    assert read_tokens(None, {"HYCO_TOKEN": ALICE}) == (ALICE,)
    assert read_tokens(None, {}) == ()


@pytest.mark.parametrize(
    ("text", "mode", "message"),
    [
        ("", 0o600, "holds no token"),
        ("# nothing\n", 0o600, "holds no token"),
        (f"{ALICE}\nshort-secret\n", 0o600, "line 2 has 12 characters, at least 16"),
        ("space-in-the middle\n", 0o600, "cannot travel in a header"),
        (f"{ALICE}é\n", 0o600, "not ASCII"),
        (ALICE, 0o644, r"read by every user \(chmod 600"),
    ],
)
def test_unusable_files_are_named_and_never_quoted(tmp_path: Path, text: str, mode: int, message: str) -> None:
    with pytest.raises(ServerError, match=message) as refusal:
        read_tokens(token_file(tmp_path, text, mode))
    assert ALICE not in str(refusal.value) and "short-secret" not in str(refusal.value)


def test_a_missing_file_and_a_short_variable(tmp_path: Path) -> None:
    with pytest.raises(ServerError, match="cannot be read: No such file"):
        read_tokens(tmp_path / "none")
    with pytest.raises(ServerError, match="token in HYCO_TOKEN has 5 characters") as refusal:
        read_tokens(None, {"HYCO_TOKEN": "hello"})
    assert "hello" not in str(refusal.value)
