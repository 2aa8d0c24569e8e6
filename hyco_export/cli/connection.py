"""How a command reaches a server: its options as a value, and the transport made from it."""

from collections.abc import Callable
from pathlib import Path

import msgspec

from hyco_export.device.calls import RetryingTransport
from hyco_export.device.client import Access, HttpTransport
from hyco_export.device.interfaces import Transport
from hyco_export.device.link import find_link, over_link
from hyco_export.errors import HycoError, ServerError
from hyco_export.protocol.security import read_tokens

RESTART_S = 60.0  # a server that is started again is waited for that long in the middle of a run


class ConnectOptions(msgspec.Struct, frozen=True):
    """How a server is reached: what it is shown, how it is known, and the link that is counted on the way."""

    token: str = ""
    authority: Path | None = None
    insecure: bool = False
    link: str | None = None
    link_waits: bool = False
    still_there: Callable[[], None] | None = None  # raises where waiting for the server is no use


def connect_options(
    token_file: Path | None, authority: Path | None, insecure: bool, link: str | None, link_waits: bool
) -> ConnectOptions:
    """What the command line says, with the token in it.

    Raises:
        HycoError: no such link, or `link_waits` without one.
        ServerError: the token file cannot be used, or holds more than the one token that a client has.
    """
    if link_waits and link is None:
        raise HycoError("--link-waits: there is no link to wait for", "give --link, or leave it out")
    if link is not None:
        find_link(link)
    tokens = read_tokens(token_file)
    if len(tokens) > 1:
        raise ServerError(f"{token_file} holds {len(tokens)} tokens, a client shows one", "give a file with one")
    return ConnectOptions(tokens[0] if tokens else "", authority, insecure, link, link_waits)


def transport_to(url: str, reach: ConnectOptions, seed: int) -> tuple[Transport, Callable[[], float]]:
    """Calls to the server at `url`, and the clock that measures them; they wait for a server that is started again.

    Raises:
        HycoError: no such link, a URL or file that cannot be used, or nobody answers.
    """
    direct = direct_transport(url, reach)
    patient = RetryingTransport(direct, RESTART_S, still_there=reach.still_there)
    transport, clock = over_link(patient, reach.link, seed, reach.link_waits)
    direct.info()  # a dead URL is said at once, before any file is hashed
    return transport, clock


def direct_transport(url: str, reach: ConnectOptions) -> HttpTransport:
    """Calls over a connection of their own, without a modelled link or patience."""
    return HttpTransport(url, access=Access(reach.token, reach.authority, reach.insecure))
