"""TLS contexts of both sides, when a server may listen where others can reach it, and bearer tokens (RFC 6750).

Tokens are read from a file or the environment, compared in constant time, and never kept or shown.
"""

import hashlib
import hmac
import ipaddress
import os
import re
import shlex
import ssl
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path

from hyco_export.errors import ProtocolError, ServerError

OLDEST_TLS = ssl.TLSVersion.TLSv1_2
VARIABLE = "HYCO_TOKEN"
SHORTEST = 16  # characters: 96 bits in base64, out of reach of guessing over a network
ANYBODY = ""  # the owner where no token is asked for
OWNER_CHARACTERS = 16  # of the digest: enough to tell tokens apart, too few to find one
SHAPE = re.compile(r"[A-Za-z0-9._~+/-]+=*")  # RFC 6750, b64token
GENERATE = "python -c 'import secrets; print(secrets.token_urlsafe(32))'"
MAKE_VARIABLE = f'make one with: export {VARIABLE}="$({GENERATE})"'
HANDSHAKE_TURNS = 3  # of each end: hello, certificates, finished
NUMBERS = re.compile(r"[\d.]+|.*:.*")  # IP addresses, well-formed or not; never a host name


def server_context(certificate: Path, key: Path) -> ssl.SSLContext:
    """A server's context from its certificate chain and key (PEM).

    Raises:
        ServerError: a file is missing, unreadable, or the two do not belong together.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = OLDEST_TLS
    try:
        context.load_cert_chain(certificate, key, password="")  # an encrypted key is an error, not a prompt
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        raise ServerError(
            f"TLS certificate {certificate} with key {key} cannot be used: {_reason(error)}",
            "give PEM files of a certificate chain and its unencrypted key",
        ) from error
    return context


def client_context(authority: Path | None = None) -> ssl.SSLContext:
    """A client's context: host names and certificates are checked, against `authority` (PEM) where it is given.

    Raises:
        ServerError: the file is missing or holds no certificate.
    """
    try:
        context = ssl.create_default_context(cafile=authority)
    except OSError as error:
        raise ServerError(
            f"certificate authority {authority} cannot be used: {_reason(error)}",
            "give the PEM file of the authority that signed the server's certificate",
        ) from error
    context.minimum_version = OLDEST_TLS
    return context


def is_self_signed(certificate: Path) -> bool:
    """Whether a certificate (PEM) is its own authority, so that clients can be given the same file."""
    known = client_context(certificate).get_ca_certs()
    return any(one["issuer"] == one["subject"] for one in known)


def certificate_names(server: ssl.SSLContext, certificate: Path) -> tuple[str, ...]:
    """The host names and addresses that a certificate (PEM) is for; none where it is not valid now.

    A handshake in memory reads them, of a client that trusts just this certificate.

    Args:
        server: the context that was made of it (`server_context`).
    """
    trusting = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    trusting.check_hostname = False
    trusting.load_verify_locations(certificate)
    trusting.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = trusting.wrap_bio(to_client, to_server)
    peer = server.wrap_bio(to_server, to_client, server_side=True)
    for end in (client, peer) * HANDSHAKE_TURNS:
        try:
            end.do_handshake()
        except ssl.SSLWantReadError:
            continue
        except ssl.SSLError:
            return ()
    names = (client.getpeercert() or {}).get("subjectAltName", ())
    return tuple(str(name[1]) for name in names if name[0] in ("DNS", "IP Address"))


def is_named(host: str, names: Sequence[str]) -> bool:
    """Is a host name or address among those of a certificate, however an address is written."""
    return _normalised(host) in {_normalised(name) for name in names}


def _normalised(host: str) -> str:
    try:
        return str(ipaddress.ip_address(host.strip("[]")))
    except ValueError:
        return host.lower()


def is_loopback(host: str) -> bool:
    """Whether an address is reachable from this machine alone."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def check_exposure(host: str, has_tls: bool, has_token: bool, insecure: bool) -> None:
    """Check that a server that other machines can reach has TLS and a token.

    Raises:
        ServerError: one is missing, without `--insecure`; or `host` is no address.
    """
    _require_address(host)
    if insecure or is_loopback(host) or (has_tls and has_token):
        return
    missing = " and no ".join(name for name, there in (("TLS", has_tls), ("token", has_token)) if not there)
    raise ServerError(
        f"{host} can be reached from other machines, and there is no {missing}",
        "give --tls-cert, --tls-key and --token-file (or HYCO_TOKEN), or say --insecure behind a proxy that has both",
    )


def _require_address(host: str) -> None:
    if not host or not NUMBERS.fullmatch(host):
        return
    try:
        ipaddress.ip_address(host)
    except ValueError as error:
        hint = "give one of this machine's addresses with --host, like 127.0.0.1, 0.0.0.0 or ::1"
        raise ServerError(f"cannot listen on {host}: it is no IP address", hint) from error


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or getattr(error, "reason", None) or str(error) or type(error).__name__


class Tokens:
    """The tokens that a server accepts; without any, every caller is ANYBODY.

    Args:
        tokens: as `read_tokens` gives them.
    """

    def __init__(self, tokens: Sequence[str] = ()) -> None:
        self._digests = [_digest(token) for token in tokens]  # of equal length: comparing them shows no token's

    def __bool__(self) -> bool:
        return bool(self._digests)

    def owner_of(self, authorization: str | None) -> str:
        """The owner behind an Authorization header.

        Raises:
            ProtocolError: code unauthorized; it gives no reason, which would help in guessing.
        """
        if not self._digests:
            return ANYBODY
        scheme, _, token = (authorization or "").partition(" ")
        seen = _digest(token.strip() if scheme.lower() == "bearer" else "")
        matches = [hmac.compare_digest(seen, known) for known in self._digests]  # always all of them, in constant time
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
        return (_checked(token, VARIABLE, MAKE_VARIABLE),) if token else ()
    try:
        mode = path.stat().st_mode
        lines = path.read_text(encoding="ascii").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not ASCII text"
        raise ServerError(
            f"token file {path} cannot be read: {reason}", f"correct the path, or {_make(path)}"
        ) from error
    if mode & stat.S_IROTH:
        raise ServerError(f"token file {path} can be read by every user", f"chmod 600 {shlex.quote(str(path))}")
    stripped = [line.partition("#")[0].strip() for line in lines]
    hint = _make(path)
    tokens = tuple(_checked(line, f"{path}, line {number}", hint) for number, line in enumerate(stripped, 1) if line)
    if not tokens:
        raise ServerError(f"token file {path} holds no token", hint)
    return tokens


def _make(path: Path) -> str:
    """How a file with a new token is made that no other user can read."""
    return f"make one with: (umask 077; {GENERATE} > {shlex.quote(str(path))})"


def _checked(token: str, place: str, hint: str) -> str:
    if len(token) < SHORTEST:
        raise ServerError(f"the token in {place} has {len(token)} characters, at least {SHORTEST} are needed", hint)
    if not SHAPE.fullmatch(token):
        raise ServerError(f"the token in {place} holds a character that cannot travel in a header", hint)
    return token


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()
