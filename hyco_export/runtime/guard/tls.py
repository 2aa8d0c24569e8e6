"""TLS contexts of both sides, and when a server may listen where others can reach it. Knows files, not HTTP."""

import ipaddress
import ssl
from pathlib import Path

from hyco_export.errors import ServerError

OLDEST = ssl.TLSVersion.TLSv1_2


def server_context(certificate: Path, key: Path) -> ssl.SSLContext:
    """A server's context from its certificate chain and key (PEM).

    Raises:
        ServerError: a file is missing, unreadable, or the two do not belong together.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = OLDEST
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
    context.minimum_version = OLDEST
    return context


def signed_itself(certificate: Path) -> bool:
    """Is a certificate (PEM) its own authority, so that clients can be given the same file."""
    known = client_context(certificate).get_ca_certs()
    return any(one["issuer"] == one["subject"] for one in known)


def is_loopback(host: str) -> bool:
    """Does an address stay on this machine."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def check_exposure(host: str, has_tls: bool, has_token: bool, insecure: bool) -> None:
    """A server that other machines can reach needs TLS and a token.

    Raises:
        ServerError: one is missing and nobody said `--insecure`.
    """
    if insecure or is_loopback(host) or (has_tls and has_token):
        return
    missing = " and no ".join(name for name, there in (("TLS", has_tls), ("token", has_token)) if not there)
    raise ServerError(
        f"{host} can be reached from other machines, and there is no {missing}",
        "give --tls-cert, --tls-key and --token-file (or HYCO_TOKEN), or say --insecure behind a proxy that has both",
    )


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or getattr(error, "reason", None) or str(error) or type(error).__name__
