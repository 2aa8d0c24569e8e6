"""Bearer tokens (RFC 6750): read from a file or the environment, compared in constant time, never kept or shown.

Knows no sessions. A caller is known by its *owner*, a short digest of its token that is safe to keep beside a session.
"""

import hashlib
import hmac
import os
import re
import shlex
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path

from hyco_export.errors import ProtocolError, ServerError

VARIABLE = "HYCO_TOKEN"
SHORTEST = 16  # characters: 96 bits in base64, out of reach of guessing over a network
ANYBODY = ""  # the owner where no token is asked for
OWNER_CHARACTERS = 16  # of the digest: tells tokens apart, does not help to find one
SHAPE = re.compile(r"[A-Za-z0-9._~+/-]+=*")  # RFC 6750, b64token
MAKE_ONE = "make one with: python -c 'import secrets; print(secrets.token_urlsafe(32))'"


class Tokens:
    """The tokens that a server takes; without any it takes every caller as ANYBODY.

    Args:
        tokens: as `read_tokens` gives them.
    """

    def __init__(self, tokens: Sequence[str] = ()) -> None:
        self._digests = [_digest(token) for token in tokens]  # of equal length: comparing tells no length

    def __bool__(self) -> bool:
        return bool(self._digests)

    def owner_of(self, authorization: str | None) -> str:
        """The owner behind an Authorization header.

        Raises:
            ProtocolError: code unauthorized. It does not say what was wrong: that would help to guess.
        """
        if not self._digests:
            return ANYBODY
        scheme, _, token = (authorization or "").partition(" ")
        seen = _digest(token.strip() if scheme.lower() == "bearer" else "")
        matches = [hmac.compare_digest(seen, known) for known in self._digests]  # all of them: no early end
        if not any(matches):
            raise ProtocolError(
                "unauthorized",
                "this server takes no calls without one of its tokens",
                "send Authorization: Bearer TOKEN",
            )
        return seen.hex()[:OWNER_CHARACTERS]


def read_tokens(path: Path | None, environment: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """Tokens of a file (one a line, `#` starts a comment), else the one in HYCO_TOKEN, else none.

    Raises:
        ServerError: the file cannot be read, is open to other users or holds none; a token is too short or misspelt.
            No message repeats a token.
    """
    if path is None:
        token = environment.get(VARIABLE, "")
        return (_checked(token, VARIABLE),) if token else ()
    try:
        mode = path.stat().st_mode
        lines = path.read_text(encoding="ascii").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not ASCII text"
        raise ServerError(f"token file {path} cannot be read: {reason}", f"correct the path, or {MAKE_ONE}") from error
    if mode & stat.S_IROTH:
        raise ServerError(f"token file {path} can be read by every user", f"chmod 600 {shlex.quote(str(path))}")
    stripped = [line.partition("#")[0].strip() for line in lines]
    tokens = tuple(_checked(line, f"{path}, line {number}") for number, line in enumerate(stripped, 1) if line)
    if not tokens:
        raise ServerError(f"token file {path} holds no token", MAKE_ONE)
    return tokens


def _checked(token: str, place: str) -> str:
    if len(token) < SHORTEST:
        raise ServerError(f"the token in {place} has {len(token)} characters, at least {SHORTEST} are needed", MAKE_ONE)
    if not SHAPE.fullmatch(token):
        raise ServerError(f"the token in {place} holds a character that cannot travel in a header", MAKE_ONE)
    return token


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()
