"""How a client reaches a server: token, authority, and the link that is counted on the way."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from hyco_export.errors import HycoError, ServerError

if TYPE_CHECKING:
    from hyco_export.runtime.ports import Transport

RESTART_S = 60.0  # a server that is started again is waited for that long in the middle of a run


class Reach(msgspec.Struct, frozen=True):
    """How a server is reached: what it is shown, how it is known, and the link that is counted on the way."""

    token: str = ""
    authority: Path | None = None
    insecure: bool = False
    link: str | None = None
    link_waits: bool = False
    still_there: Callable[[], None] | None = None  # raises where waiting for the server is no use


def reach_of(
    token_file: Path | None, authority: Path | None, insecure: bool, link: str | None, link_waits: bool
) -> Reach:
    """What the command line says, with the token in it.

    Raises:
        HycoError: `link_waits` without a link.
        ServerError: the token file cannot be used, or holds more than the one token that a client has.
    """
    from hyco_export.runtime.guard.tokens import read_tokens

    if link_waits and link is None:
        raise HycoError("--link-waits: there is no link to wait for", "give --link, or leave it out")
    tokens = read_tokens(token_file)
    if len(tokens) > 1:
        raise ServerError(f"{token_file} holds {len(tokens)} tokens, a client shows one", "give a file with one")
    return Reach(tokens[0] if tokens else "", authority, insecure, link, link_waits)


def transport_to(url: str, reach: Reach, seed: int) -> tuple["Transport", Callable[[], float]]:
    """Calls to the server at `url`, and the clock that measures them; they wait for a server that is started again.

    Raises:
        HycoError: no such link, a URL or file that cannot be used, or nobody answers.
    """
    from hyco_export.runtime.link.presets import over_link
    from hyco_export.runtime.persistence import PersistentTransport
    from hyco_export.runtime.transport import Access, HttpTransport

    direct = HttpTransport(url, access=Access(reach.token, reach.authority, reach.insecure))
    patient = PersistentTransport(direct, RESTART_S, still_there=reach.still_there)
    transport, clock = over_link(patient, reach.link, seed, reach.link_waits)
    direct.info()  # a dead URL is said at once, before any file is hashed
    return transport, clock
