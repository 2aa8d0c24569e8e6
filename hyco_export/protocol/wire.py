"""The wire format: MessagePack bodies of every call, and the padding of replies. PROTOCOL.md describes it in words.

Structs travel as arrays (field order is the format), the protocol version first. A field has a default only where
PROTOCOL.md calls it optional: what a caller leaves out is never guessed. Never on the wire: masks, positions,
cache indices, floats from the device other than sampling settings.
"""

import hashlib
from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeVar, get_args

import msgspec
import numpy as np
from msgspec import Meta

from hyco_export.errors import ProtocolError


class Traffic(msgspec.Struct, frozen=True):
    """Bytes of one call: bodies alone (without padding), and all that HTTP sends.

    `repeats` counts its failed tries: broken or stale connections, no answer in time, 429 and 503.
    """

    payload_up_bytes: int
    payload_down_bytes: int
    wire_up_bytes: int
    wire_down_bytes: int
    repeats: int = 0


PROTOCOL_VERSION = 1
MEDIA_TYPE = "application/msgpack"
UNKNOWN_SESSION = "unknown_session"  # refusal code: the server lost or never had the session; the device primes again

DraftSide = Literal["device", "server", "reply"]
DraftScope = Literal["full", "artifact"]
DRAFT_SIDES: tuple[str, ...] = get_args(DraftSide)
DRAFT_SCOPES: tuple[str, ...] = get_args(DraftScope)


class Sampling(msgspec.Struct, frozen=True, array_like=True):
    """The verifier's sampling: temperature 0 is greedy; top_k 0 and top_p 1 switch the cut off."""

    temperature: float
    top_k: int
    top_p: float


PAPER_SAMPLING = Sampling(temperature=1.0, top_k=64, top_p=0.95)  # of all systems (HyCo, Table 2)


class Acceptance(msgspec.Struct, frozen=True, array_like=True):
    """The acceptance rule of a session, a name in `acceptance.RULES`, and options that some rules read.

    `stop_needs_draw`: no stop token is accepted by a threshold alone. The last two are Medusa's, for `typical`. A field
    with a description is also an option of `hyco-export replay`.
    """

    rule: str
    epsilon: float
    stop_needs_draw: bool = False
    posterior_threshold: Annotated[float, Meta(description="For `typical`.")] = 0.09
    posterior_alpha: Annotated[float, Meta(description="For `typical`.")] = 0.3


EXACT = Acceptance("exact", epsilon=1.0)  # every option has the value that switches it off, or its default


class PrimeRequest(msgspec.Struct, frozen=True, array_like=True):
    """POST /v1/sessions. `continue_from` > 0 re-primes: that many tail ids of `prompt` were already generated.

    `draft_side`: "device"; "server", whose head drafts what the round verifies; "reply", whose head drafts a chain that
    comes with each reply for the device's next tree. `draft_scope` "artifact" restricts the server's head to the keep
    set and the window of its head artifact. `unverified`: rounds may bring tokens that the device kept unasked.
    """

    version: int
    prompt: list[int]
    sampling: Sampling
    acceptance: Acceptance
    seed: int
    max_new_tokens: int
    draft_side: str  # one of DRAFT_SIDES; not a Literal: the refusal of another one names it
    draft_steps: int  # K of the server's own head; 0 when the device drafts
    head_digest: str  # manifest key of the head artifact whose encodings the device uses; "" when it needs no hand-off
    continue_from: int = 0
    trace: bool = False  # replies say how each round was judged (`Evidence`)
    draft_scope: str = "full"  # one of DRAFT_SCOPES
    unverified: bool = False
    first_rows: int = 0  # newest K/V rows of the first reply, as many older ones a round after it; 0: the whole window
    attempt: str = ""  # random; the same again replaces the session that an earlier try opened


class Handoff(msgspec.Struct, frozen=True, array_like=True):
    """e(root) and h in 8 bits, and K/V rows (core.handoff layout) of positions first_position ...

    `older_kv` are rows of positions older_first ... that the first reply left out (`PrimeRequest.first_rows`).
    """

    e: bytes
    h: bytes
    kv: bytes
    first_position: int
    older_kv: bytes = b""
    older_first: int = 0


class PrimeReply(msgspec.Struct, frozen=True, array_like=True):
    """`root` is the first new token (already drawn); `length` counts the committed ids, root included."""

    version: int
    session: str
    root: int
    length: int
    finished: str  # "", "stop" or "length"
    handoff: Handoff | None
    server_ms: float
    chain: list[int] = []  # drafted for the next round, with draft side "reply"


class VerifyRequest(msgspec.Struct, frozen=True, array_like=True):
    """POST /v1/sessions/{id}/rounds/{n}. `length` and `digest` state what the device believes is committed.

    `kept` are tokens after these that the device committed by itself; the tree's root is then the last of them.
    """

    version: int
    length: int
    digest: bytes
    tokens: list[int]
    parents: list[int]
    kept: list[int] = []


class VerifyReply(msgspec.Struct, frozen=True, array_like=True):
    """`accepted` are rows of the sent tree from depth 1 down; `tokens` the committed ids of this round, bonus last.

    `drawn[i]` is True where accepted row i equals the verifier's own draw, False where only the threshold took it.
    When the path is cut at a stop id or the token cap, `tokens` ends there and `finished` says why.
    `drafted` is the number of nodes the server drafted itself (0 when the device drafts).
    """

    version: int
    round: int
    accepted: list[int]
    drawn: list[bool]
    tokens: list[int]
    finished: str
    handoff: Handoff | None
    drafted: int
    server_ms: float
    evidence: "Evidence | None" = None
    chain: list[int] = []  # as in PrimeReply


class Evidence(msgspec.Struct, frozen=True):
    """What a round was judged by, as a map: enough to judge the same tree by another rule (`evaluate.replay`).

    `tokens` and `parents` [N] are the tree that was verified: the device's, or the chain that the server drafted. Row 0
    is the root, row i + 1 node i: `draws` [N + 1]. `probs` [N] = p~(token | parent); `raw_probs` [N] and `entropies`
    [N + 1] (nats) are of softmax(logits / T) before any cut.
    """

    tokens: list[int]
    parents: list[int]
    draws: list[int]
    probs: list[float]
    raw_probs: list[float]
    entropies: list[float]


class Refusal(msgspec.Struct, frozen=True, array_like=True):
    """Body of every 4xx and 5xx: a typed code, what was seen, what to do, and when to try the same call again."""

    version: int
    code: str
    message: str
    hint: str
    retry_after_s: int = 0  # as in the header Retry-After; 0: waiting does not help


class ServerInfo(msgspec.Struct, frozen=True):
    """GET /v1/info, as a map: what the device compares before it primes."""

    version: int
    server: str
    verifier_digest: str
    tokenizer_digest: str
    vocab_size: int
    stop_ids: list[int]
    head_digest: str  # "" when the server holds no head artifact
    keepset_digest: str
    node_limit: int
    prompt_limit: int
    server_steps: int  # K its own head can draft; 0 without one
    rules: list[str]
    clock: str  # what server_ms is: "cuda-events", "thread-cpu" or "process-cpu"
    context_limit: int = 0  # positions of a session: prompt and max_new_tokens; 0: unknown (an older server)
    rows_ms: list[tuple[int, float]] = []  # server_ms of one pass by its rows, which grow; empty: not measured


Body = TypeVar("Body", bound=msgspec.Struct)
_encoder = msgspec.msgpack.Encoder()


def encode(body: msgspec.Struct) -> bytes:
    """Bytes of a message."""
    return _encoder.encode(body)


def decode(payload: bytes, kind: type[Body]) -> Body:
    """A message of `kind` from its bytes.

    Raises:
        ProtocolError: code `malformed` (not MessagePack, wrong types, missing fields) or `version`.
    """
    try:
        if "version" in kind.__struct_fields__:
            _check_version(payload)
        return msgspec.msgpack.decode(payload, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:  # the last: nested too deep
        raise ProtocolError(
            "malformed", f"body is not a {kind.__name__}: {error}", "compare it with hyco_export/protocol/PROTOCOL.md"
        ) from error


class _Versioned(msgspec.Struct, array_like=True):
    """The part that all versions share: after the first element a body may have any shape."""

    version: int


def _check_version(payload: bytes) -> None:
    """Of a message in any shape, array or map; one that says no version is this one's to refuse."""
    head = msgspec.msgpack.decode(payload, type=_Versioned | dict[Any, msgspec.Raw])
    if isinstance(head, _Versioned):
        version = head.version
    else:
        version = msgspec.msgpack.decode(head["version"], type=int) if "version" in head else PROTOCOL_VERSION
    if version != PROTOCOL_VERSION:
        raise ProtocolError(
            "version",
            f"protocol version {version}, this side speaks {PROTOCOL_VERSION}",
            "run the same release of hyco-export on both sides",
        )


def committed_digest(ids: Sequence[int]) -> bytes:
    """8 bytes that both sides compute over all committed ids (little-endian int32), to catch a lost round at once."""
    return hashlib.blake2b(np.asarray(ids, dtype="<i4").tobytes(), digest_size=8).digest()


# ---- padding: an observer of a TLS link sees sizes, which tell how many drafts were accepted

FIXARRAY = 0x90  # MessagePack: an array of n < 16 elements begins with 0x90 + n
FIXARRAY_MOST = 15
BIN32 = b"\xc6"
BIN32_HEADER_BYTES = 5  # for every length: with shorter headers some sizes could not be reached
HEADER = "Hyco-Padding"
LARGEST_STEP_BYTES = 1 << 24  # above the largest reply (6.3 MB in the paper), below the 64 MiB that clients refuse
HEADER_DIGITS = 9  # always: the length of the header must not tell what the padding hides


def pad(body: bytes, step_bytes: int) -> bytes:
    """A message (an array) padded to the next multiple of `step_bytes`.

    Raises:
        ValueError: the body is no array, or has no room for one more element.
    """
    count = body[0] - FIXARRAY
    if not 0 <= count < FIXARRAY_MOST:
        raise ValueError(f"a body that begins with 0x{body[0]:02x} is no array with room for its padding")
    size = padded_size(len(body), step_bytes)
    zeros = size - len(body) - BIN32_HEADER_BYTES
    return bytes([body[0] + 1]) + body[1:] + BIN32 + zeros.to_bytes(4, "big") + bytes(zeros)


def padding_bytes(header: str) -> int:
    """How many bytes of a body are padding, from the value of HEADER; 0 for a value that `pad` does not make."""
    return int(header) if len(header) == HEADER_DIGITS and header.isascii() and header.isdecimal() else 0


def padded_size(size_bytes: int, step_bytes: int) -> int:
    """Size of a padded body of `size_bytes`."""
    return -(-(size_bytes + BIN32_HEADER_BYTES) // step_bytes) * step_bytes
