"""What a server admits: its limits, the checks of a PRIME request, the K/V memory of all sessions together.

Every check is made before anything is allocated.
"""

import math
from collections.abc import Sequence

import msgspec

from hyco_export.core.numerics import BYTES_PER_MB, COLDEST, HOTTEST, NODE_LIMIT
from hyco_export.errors import ProtocolError
from hyco_export.protocol import wire
from hyco_export.protocol.acceptance import check_acceptance
from hyco_export.protocol.refusals import shown

SEED_LIMIT = 2**64  # half of the generator's key
LONGEST_ATTEMPT = 64  # characters
ANY_SESSION_S = 5.0  # in which one of several sessions may well end
SHORTEST_WAIT_S = 1.0
RESTART_S = 1.0  # after which a server that is stopping may be there again
PRIME_AGAIN = "prime again with the committed ids"


class Facts(msgspec.Struct, frozen=True):
    """What the models behind a server are."""

    vocab_size: int
    stop_ids: frozenset[int]
    context_limit: int  # positions the verifier was made for
    head_digest: str = ""  # key of the head artifact whose encodings it sends; "" without one
    handoff_window: int = 0  # K/V positions that the head artifact keeps
    server_steps: int = 0  # K of the server's own head; 0 without one
    restricts: bool = False  # it can draft over a head artifact's keep set and window


class Limits(msgspec.Struct, frozen=True):
    """What a server gives at most."""

    sessions: int = 16
    sessions_per_token: int = 8  # on a server without tokens callers cannot be told apart: the first limit alone
    node_limit: int = NODE_LIMIT
    prompt_limit: int = 32_768
    idle_s: float = 600.0
    cache_bytes: int | None = None  # K/V memory of all sessions together; None: not counted


class Batching(msgspec.Struct, frozen=True):
    """How calls share a pass."""

    sessions: int = 8  # in one pass, at most
    wait_ms: float = 1.0  # batch window: a pass waits so long for further sessions, while there are any
    prefill_rows: int = 256  # rows of prompts in one pass, at most


class CacheBudget:
    """K/V memory that sessions may take together; not thread-safe.

    Args:
        limit_bytes: None: everything is granted, and counted.
    """

    def __init__(self, limit_bytes: int | None) -> None:
        self._limit_bytes = limit_bytes
        self.used_bytes = 0

    def take(self, size_bytes: int, next_expiry_s: float | None) -> None:
        """Reserve a session's cache.

        next_expiry_s: seconds until an idle session expires; None when none is idle.

        Raises:
            ProtocolError: codes cache_size (it never fits), cache_full (it does not fit now).
        """
        limit = self._limit_bytes
        if limit is not None and size_bytes > limit:
            raise ProtocolError(
                "cache_size",
                f"prompt and max_new_tokens need {_mb(size_bytes)} of cache, this server has {_mb(limit)}",
                "shorten the prompt or ask for fewer tokens",
            )
        if limit is not None and self.used_bytes + size_bytes > limit:
            free = _mb(limit - self.used_bytes)
            latest = expiry_hint(", ", next_expiry_s)
            raise ProtocolError(
                "cache_full",
                f"prompt and max_new_tokens need {_mb(size_bytes)} of cache, {free} of {_mb(limit)} are free",
                f"try again when another session has ended{latest}; or ask for fewer tokens",
                retry_wait_s(next_expiry_s),
            )
        self.used_bytes += size_bytes

    def give_back(self, size_bytes: int) -> None:
        """Free what a session had reserved."""
        self.used_bytes -= size_bytes


def retry_wait_s(next_expiry_s: float | None) -> float:
    """When a refused caller should try again: an idle session expires then, and any other may have ended before."""
    return ANY_SESSION_S if next_expiry_s is None else min(ANY_SESSION_S, max(SHORTEST_WAIT_S, next_expiry_s))


def expiry_hint(lead: str, next_expiry_s: float | None) -> str:
    """The end of a hint: when there is a place at the latest, unless somebody uses the idle session again."""
    if next_expiry_s is None:
        return ""
    return f"{lead}in {math.ceil(max(SHORTEST_WAIT_S, next_expiry_s))} s the longest idle one expires"


def no_such_session() -> ProtocolError:
    """The one refusal for sessions that expired, ended, never were or are another caller's: nobody can tell which."""
    return ProtocolError(wire.UNKNOWN_SESSION, "no such session: it expired, ended or never was", PRIME_AGAIN)


def shutting_down(reason: str) -> ProtocolError:
    """The refusal of a server that stops."""
    return ProtocolError("shutting_down", reason, f"try another server, or {PRIME_AGAIN}", RESTART_S)


def _mb(size_bytes: int) -> str:
    return f"{size_bytes / BYTES_PER_MB:.1f} MB"


def check_attempt(request: wire.PrimeRequest) -> None:
    """The fields that are read before a token's share and before `check_prime`.

    Raises:
        ProtocolError: code value_range.
    """
    if request.first_rows < 0:
        raise ProtocolError("value_range", f"first_rows is {request.first_rows}, it must be 0 (whole window) or more")
    if len(request.attempt) > LONGEST_ATTEMPT:
        seen = f"attempt has {len(request.attempt)} characters, at most {LONGEST_ATTEMPT} are taken"
        raise ProtocolError("value_range", seen)


def check_prime(request: wire.PrimeRequest, facts: Facts, limits: Limits) -> None:
    """Refuse what this server cannot do, with the field's name.

    Raises:
        ProtocolError: codes prompt_size, token_range, value_range, head_mismatch, unsupported.
    """
    _check_names(request)
    _check_prompt(request.prompt, facts.vocab_size, limits.prompt_limit)
    _check_values(request)
    check_acceptance(request.acceptance)
    _check_length(request, facts.context_limit)
    _check_draft_side(request, facts.server_steps)
    _check_options(request, facts)
    if request.head_digest and request.head_digest != facts.head_digest:
        held = f"holds {facts.head_digest[:12]}" if facts.head_digest else "holds none"
        raise ProtocolError(
            "head_mismatch",
            f"head_digest names head artifact {request.head_digest[:12]!r}, this server {held}",
            "start the server on the run folder that the device's artifacts come from",
        )


def _check_names(request: wire.PrimeRequest) -> None:
    for field, value, known in (
        ("draft_side", request.draft_side, wire.DRAFT_SIDES),
        ("draft_scope", request.draft_scope, wire.DRAFT_SCOPES),
    ):
        if value not in known:
            raise ProtocolError("unsupported", f"{field} is {shown(value)}", f"known ones: {', '.join(known)}")


def _check_prompt(prompt: Sequence[int], vocab_size: int, prompt_limit: int) -> None:
    if len(prompt) > prompt_limit:
        raise ProtocolError("prompt_size", f"prompt has {len(prompt)} ids, at most {prompt_limit} are taken")
    if not prompt:
        raise ProtocolError("value_range", "prompt is empty, it must hold at least one id")
    if min(prompt) < 0 or max(prompt) >= vocab_size:
        raise ProtocolError("token_range", f"prompt holds an id outside [0, {vocab_size})")


def _check_values(request: wire.PrimeRequest) -> None:
    sampling = request.sampling
    rules = (
        (
            sampling.temperature == 0.0 or COLDEST <= sampling.temperature <= HOTTEST,
            f"sampling.temperature is {sampling.temperature}, it must be 0 or lie in [{COLDEST}, {HOTTEST}]",
        ),
        (sampling.top_k >= 0, f"sampling.top_k is {sampling.top_k}, it must be 0 (off) or more"),
        (0.0 < sampling.top_p <= 1.0, f"sampling.top_p is {sampling.top_p}, it must lie in (0, 1]"),
        (0 <= request.seed < SEED_LIMIT, f"seed is {request.seed}, it must lie in [0, 2**64)"),
        (request.max_new_tokens >= 1, f"max_new_tokens is {request.max_new_tokens}, it must be 1 or more"),
        (
            0 <= request.continue_from < min(len(request.prompt), request.max_new_tokens),
            f"continue_from is {request.continue_from}, it must be 0 or more and smaller than "
            "max_new_tokens and the prompt",
        ),
    )
    for holds, message in rules:
        if not holds:
            raise ProtocolError("value_range", message)


def _check_length(request: wire.PrimeRequest, context_limit: int) -> None:
    total = len(request.prompt) - request.continue_from + request.max_new_tokens
    if total > context_limit:
        raise ProtocolError(
            "value_range",
            f"prompt and max_new_tokens need {total} positions, the verifier was made for {context_limit}",
            "shorten the prompt or ask for fewer tokens",
        )


def _check_draft_side(request: wire.PrimeRequest, server_steps: int) -> None:
    steps = request.draft_steps
    if request.draft_side == "device":
        if steps != 0:
            raise ProtocolError("value_range", f"draft_steps is {steps}, it must be 0 where the device drafts")
        return
    if server_steps == 0:
        raise ProtocolError("unsupported", "draft_side is server, but this server has no head of its own")
    if not 1 <= steps <= server_steps:
        raise ProtocolError("value_range", f"draft_steps is {steps}, this server drafts 1 to {server_steps}")


def _check_options(request: wire.PrimeRequest, facts: Facts) -> None:
    if request.draft_scope == "artifact" and request.draft_side == "device":
        raise ProtocolError("unsupported", "draft_scope is artifact, but the server drafts nothing in this session")
    if request.draft_scope == "artifact" and not facts.restricts:
        raise ProtocolError(
            "unsupported",
            "draft_scope is artifact, but this server holds no head artifact with its keep set",
            "start the server on the run folder",
        )
    if request.unverified and request.draft_side != "device":
        raise ProtocolError("unsupported", f"unverified needs a device that drafts, draft_side is {request.draft_side}")


class ServeOptions(msgspec.Struct, frozen=True):
    """How a server uses its machine, chosen by its operator; none of it changes a token.

    sessions: held at once; None for the usual number.
    cache_bytes: K/V memory of all sessions together; None: half of what is free once the models are loaded.
    context_limit: positions of a session; None: what the verifier was made for. Its rotary embedding goes on beyond
        that, to positions that it was not trained on.
    idle_s: seconds after which a session that nobody calls is forgotten; None: the usual time.
    compiled: let torch's compiler make the layers, at the first passes: for GPUs.
    servers: replicas that share the machine's memory.
    row_times: measure at the start what a pass of so many rows takes (`ServerInfo.rows_ms`).
    """

    sessions: int | None = None
    batching: Batching = Batching()
    cache_bytes: int | None = None
    context_limit: int | None = None
    idle_s: float | None = None
    compiled: bool = False
    servers: int = 1
    row_times: bool = False
