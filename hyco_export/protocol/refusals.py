"""Typed refusals and the HTTP status of each. `STATUS_OF` lists every code; PROTOCOL.md repeats it."""

import math

from hyco_export.errors import HycoError, ProtocolError
from hyco_export.protocol import wire

SHOWN_CHARACTERS = 40  # of a caller's word in a message


def shown(word: str) -> str:
    """A caller's word as a refusal repeats it: quoted, cut to SHOWN_CHARACTERS."""
    return repr(word[:SHOWN_CHARACTERS])


def refused(body: bytes) -> ProtocolError:
    """The typed refusal in a reply's body."""
    refusal = wire.decode(body, wire.Refusal)
    return ProtocolError(refusal.code, refusal.message, refusal.hint)


STATUS_OF = {
    "malformed": 400,  # the body is not the call's message
    "version": 400,
    "tree_shape": 400,
    "tree_size": 400,
    "token_range": 400,
    "parent_order": 400,
    "duplicate_sibling": 400,
    "unauthorized": 401,
    "origin": 403,
    wire.UNKNOWN_SESSION: 404,
    "unknown_route": 404,
    "method": 405,
    "slow": 408,
    "round_stale": 409,  # what the device believes and what the server knows differ
    "round_future": 409,
    "round_differs": 409,
    "length_differs": 409,
    "digest_differs": 409,
    "session_finished": 409,
    "head_mismatch": 409,
    "body_size": 413,
    "prompt_size": 413,
    "cache_size": 413,
    "media_type": 415,
    "value_range": 422,
    "unsupported": 422,
    "sessions_full": 429,
    "cache_full": 429,
    "cancelled": 499,  # the caller has gone: not sent, only counted
    "model_fault": 500,  # the server's own: this session is lost, the others are not
    "internal": 500,
    "connections_full": 503,
    "shutting_down": 503,
}


def status_of(refusal: ProtocolError) -> int:
    """HTTP status of a refusal.

    Raises:
        KeyError: a code that the table lacks.
    """
    return STATUS_OF[refusal.code]


def body_of(refusal: ProtocolError) -> wire.Refusal:
    """The reply's body."""
    return wire.Refusal(wire.PROTOCOL_VERSION, refusal.code, refusal.message, refusal.hint, math.ceil(refusal.wait_s))


def headers_of(refusal: ProtocolError) -> dict[str, str]:
    """The reply's headers beyond the media type: when to retry, how to authenticate."""
    headers = {"Retry-After": str(math.ceil(refusal.wait_s))} if refusal.wait_s else {}
    return headers | ({"WWW-Authenticate": "Bearer"} if refusal.code == "unauthorized" else {})


def as_refusal(error: HycoError) -> ProtocolError:
    """Any error of this package as a refusal; `model_fault` where it has no code of its own."""
    if isinstance(error, ProtocolError):
        return error
    return ProtocolError("model_fault", error.message, error.hint)
