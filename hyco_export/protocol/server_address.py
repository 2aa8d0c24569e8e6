"""The address of a server: writes and reads its URL, and turns the failure of a call there into an error with a next
step.

Errors of TLS, resolver and HTTP are told apart by their types; a TLS handshake without data shows whether a server
speaks TLS.
"""

import http.client
import re
import socket
import ssl
from pathlib import Path
from urllib.parse import SplitResult, quote, unquote, urlsplit

import msgspec

from hyco_export.errors import ServerError, UnreachableError
from hyco_export.protocol.security import is_loopback

LOOPBACK = "127.0.0.1"
WILDCARDS = {
    "": LOOPBACK,
    "0.0.0.0": LOOPBACK,
    "::": "::1",
}  # all addresses; one of this machine
USUAL_PORT = 8411
EXAMPLE = f"write it like http://{LOOPBACK}:{USUAL_PORT}"
UNPRINTABLE = re.compile(r"[\s\x00-\x1f\x7f]")
NOT_TLS = ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "HTTP_REQUEST", "PACKET_LENGTH_TOO_LONG")  # of OpenSSL
WRONG_NAME = (62, 64)  # X509_V_ERR_HOSTNAME_MISMATCH, X509_V_ERR_IP_ADDRESS_MISMATCH
WRONG_TIME = (9, 10)  # X509_V_ERR_CERT_NOT_YET_VALID, X509_V_ERR_CERT_HAS_EXPIRED
HANDSHAKE_S = 1.0
SHOWN_CHARACTERS = 80  # of another program's answer


def url_of(host: str, port: int, tls: bool = False) -> str:
    """The URL of a server that listens at an address, as a client on this machine can call it."""
    named = WILDCARDS.get(host, host)
    if ":" in named:
        address, percent, zone = named.partition("%")
        named = f"[{address}{'%25' if percent else ''}{quote(zone, safe='')}]"  # RFC 6874
    return f"{'https' if tls else 'http'}://{named}:{port}"


class ServerAddress(msgspec.Struct, frozen=True):
    """A server's URL, taken apart. `authority` (PEM) is what its certificate is checked against, None: the system's."""

    url: str
    tls: bool
    host: str  # as the resolver takes it
    port: int | None
    prefix: str  # of every path, without the last slash
    authority: Path | None = None

    @property
    def root(self) -> str:
        """The URL without a path."""
        return self.url.removesuffix("/").removesuffix(self.prefix)

    def with_scheme(self, scheme: str) -> str:
        """The URL with another scheme."""
        return f"{scheme}://{self.url.partition('://')[2]}"


def read_url(url: str, authority: Path | None = None) -> ServerAddress:
    """The address in a URL.

    Raises:
        ServerError: it has no http or https scheme, no host, an impossible port, blanks, a query or fragment, or
            credentials (not repeated); an authority for a server without TLS.
    """
    url = url.strip()
    if "@" in url:
        raise ServerError("the server URL holds a user name or password, which nothing here sends", EXAMPLE)
    if UNPRINTABLE.search(url):
        raise ServerError(f"server URL {url!r} holds blanks or control characters", EXAMPLE)
    hint = EXAMPLE + (" (IPv6 addresses in brackets: http://[::1]:8411)" if url.count(":") > 2 else "")
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        (parts.hostname or "").encode("idna")
    except ValueError as error:
        raise ServerError(f"server URL {url!r} cannot be read: {error}", hint) from error
    if not usable:
        raise ServerError(f"server URL {url!r} is not http://HOST:PORT or https://HOST:PORT", hint)
    if parts.query or parts.fragment:
        raise ServerError(f"server URL {url!r} has a query or fragment, calls add their own paths to it", EXAMPLE)
    if authority is not None and parts.scheme == "http":
        raise ServerError(f"--ca {authority}: {url} is reached without TLS", "give the https URL, or leave --ca out")
    return ServerAddress(
        url, parts.scheme == "https", _resolvable(parts), parts.port, parts.path.rstrip("/"), authority
    )


def _resolvable(parts: SplitResult) -> str:
    host = parts.hostname or ""
    return unquote(host) if ":" in host else host  # the % before a zone is written %25


def is_permanent(error: Exception) -> bool:
    """Whether the address itself is wrong, so that the same call fails again."""
    return isinstance(error, ssl.SSLCertVerificationError) or _has_reason(error, NOT_TLS)


def failed_call(address: ServerAddress, error: Exception) -> ServerError:
    """The error for a call without an answer: an UnreachableError where the same call may get one later."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return _bad_certificate(address, error)
    if _has_reason(error, NOT_TLS):
        return ServerError(
            f"what listens at {address.url} answers without TLS",
            f"give the URL with http: {address.with_scheme('http')}",
        )
    garbled = isinstance(error, http.client.BadStatusLine | ConnectionResetError)  # RemoteDisconnected is both
    if garbled and not address.tls and _speaks_tls(address):
        return _wants_tls(address)
    message = f"no answer from the verifier server at {address.url}: {_reason(error)}"
    return UnreachableError(message, _hint(address, error))


def foreign_answer(address: ServerAddress, response: http.client.HTTPResponse) -> ServerError:
    """The error for an answer that is not a verifier server's."""
    if not address.tls and _speaks_tls(address):  # some servers say in plain HTTP that they want TLS
        return _wants_tls(address)
    program = response.headers.get("Server", "")
    hint = "give the URL that `hyco-export serve` printed" + (f": {program} answers there" if program else "")
    if target := response.headers.get("Location", ""):
        hint = f"it leads to {target}: give with --server the URL that answers itself"
    elif response.status in (401, 403, 407):
        hint = "a proxy or another program refuses the call there: " + hint
    return ServerError(
        f"{address.url} answered {response.status} {response.reason}, which is not a verifier server's answer", hint
    )


def _wants_tls(address: ServerAddress) -> ServerError:
    hint = f"give the URL with https: {address.with_scheme('https')}"
    return ServerError(f"what listens at {address.url} speaks TLS", hint)


def _bad_certificate(address: ServerAddress, error: ssl.SSLCertVerificationError) -> ServerError:
    if error.verify_code in WRONG_NAME:
        hint = "give with --server a host name or address that the certificate is for"
    elif error.verify_code in WRONG_TIME:
        hint = "renew it on the server, or correct the clock of this machine"
    elif address.authority is not None:
        hint = f"give its authority with --ca: {address.authority} did not sign it"
    else:
        hint = "give its authority with --ca; of a self-signed certificate that is its own file"
    return ServerError(
        f"the server at {address.url} shows a certificate that is not trusted: {error.verify_message}", hint
    )


def _hint(address: ServerAddress, error: Exception) -> str:
    if isinstance(error, socket.gaierror):
        return "correct the host name in --server"
    if isinstance(error, http.client.BadStatusLine) and not isinstance(error, http.client.RemoteDisconnected):
        return "another program listens there: give the URL that `hyco-export serve` printed"
    tls = ", with its --tls-cert and --tls-key," if address.tls else ","
    return f"start it with `hyco-export serve{_listening(address)}`{tls} or correct --server"


def _listening(address: ServerAddress) -> str:
    """The options with which a server of this machine listens at an address; none for another machine's."""
    if not is_loopback(address.host):
        return ""
    host = "" if address.host in (LOOPBACK, "localhost") else f" --host {address.host}"
    return host + (f" --port {address.port}" if address.port not in (None, USUAL_PORT) else "")


def _reason(error: Exception) -> str:
    if isinstance(error, socket.gaierror):
        return f"no host of this name is known ({error.strerror})"
    if isinstance(error, http.client.BadStatusLine) and not isinstance(error, http.client.RemoteDisconnected):
        return f"what listens there speaks no HTTP: {str(error).strip()[:SHOWN_CHARACTERS]}"
    if isinstance(error, ssl.SSLError):
        return f"TLS fails: {(error.reason or str(error)).lower().replace('_', ' ')}"
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


def _has_reason(error: Exception, reasons: tuple[str, ...]) -> bool:
    return isinstance(error, ssl.SSLError) and error.reason in reasons


def _speaks_tls(address: ServerAddress) -> bool:
    """Whether a TLS handshake succeeds there, whatever the certificate; nothing is sent or trusted."""
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    try:
        with socket.create_connection((address.host, address.port or 80), HANDSHAKE_S) as plain:
            context.wrap_socket(plain, server_hostname=address.host).close()
    except (OSError, ValueError):
        return False
    return True
