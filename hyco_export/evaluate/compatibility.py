"""Does a server belong to this run? Compares what it says of itself with the artifacts, before anything is drafted.

A drafter whose scales, ids or weights differ from the verifier's still runs and still gives right text: it only stops
being accepted. Hence every part is compared by digest. Pure; `evaluate.run_artifacts` reads the files.
"""

from collections.abc import Iterator

import msgspec

from hyco_export.errors import ServerError
from hyco_export.runtime.wire import PROTOCOL_VERSION, ServerInfo

SHOWN_DIGITS = 12  # of a digest in a message


class Expected(msgspec.Struct, frozen=True):
    """What the run's artifacts demand of a server."""

    verifier_digest: str
    tokenizer_digest: str
    vocab_size: int
    keepset_digest: str
    head_digest: str  # manifest key of the head artifact whose encodings the hand-off uses
    node_limit: int  # nodes of the largest tree that will be sent
    server_steps: int  # chain length of the server's own head, for the baseline
    rules: tuple[str, ...]


def mismatches(info: ServerInfo, expected: Expected) -> list[str]:
    """Every difference in words; empty when the server fits."""
    return [*_digest_mismatches(info, expected), *_ability_mismatches(info, expected)]


def require_compatible(info: ServerInfo, expected: Expected, url: str) -> None:
    """Stop before the first prompt when the server serves something else.

    Raises:
        ServerError: names every mismatch.
    """
    found = mismatches(info, expected)
    if found:
        raise ServerError(
            f"the server at {url} does not belong to this run: " + "; ".join(found),
            "start it with the same recipe and run folder: hyco-export serve",
        )


def require_room(info: ServerInfo, prompt_id: str, prompt_length: int, max_new_tokens: int) -> None:
    """Stop before a prompt is sent that the server would refuse for its length.

    Raises:
        ServerError: more ids than it takes, or more positions with the answer than its verifier has.
    """
    hint = "shorten the prompt or ask for fewer tokens"
    if prompt_length > info.prompt_limit:
        raise ServerError(f"prompt {prompt_id} has {prompt_length} ids, the server takes {info.prompt_limit}", hint)
    positions = prompt_length + max_new_tokens
    if info.context_limit and positions > info.context_limit:
        raise ServerError(
            f"prompt {prompt_id} and its answer need {positions} positions, the server's verifier has "
            f"{info.context_limit}",
            hint,
        )


def require_same(info: ServerInfo, before: ServerInfo) -> None:
    """After an outage in the middle of a run: figures of two servers must not be pooled.

    Raises:
        ServerError: names what the server says otherwise than before.
    """
    changed = [
        f"{name} was {getattr(before, name)}, is {getattr(info, name)}"
        for name in ServerInfo.__struct_fields__
        if getattr(info, name) != getattr(before, name)
    ]
    if changed:
        raise ServerError(
            f"another server answers than at the start of the run: {'; '.join(changed)}",
            "run the command again, with one server from its start to its end",
        )


def _digest_mismatches(info: ServerInfo, expected: Expected) -> Iterator[str]:
    if info.version != PROTOCOL_VERSION:
        yield f"it speaks protocol version {info.version}, this side {PROTOCOL_VERSION}"
    pairs = (
        ("verifier checkpoint", info.verifier_digest, expected.verifier_digest),
        ("tokenizer", info.tokenizer_digest, expected.tokenizer_digest),
        ("keep set", info.keepset_digest, expected.keepset_digest),
        ("head artifact (its encodings)", info.head_digest, expected.head_digest),
    )
    for name, seen, wanted in pairs:
        if seen != wanted:
            yield f"{name} is {_short(seen)} there, {_short(wanted)} here"
    if info.vocab_size != expected.vocab_size:
        yield f"its vocabulary has {info.vocab_size:,} tokens, the artifacts' {expected.vocab_size:,}"


def _ability_mismatches(info: ServerInfo, expected: Expected) -> Iterator[str]:
    if info.node_limit < expected.node_limit:
        yield f"it verifies at most {info.node_limit} nodes a round, the recipe sends {expected.node_limit}"
    if info.server_steps < expected.server_steps:
        yield f"its own head drafts {info.server_steps} tokens, the baseline needs {expected.server_steps}"
    for rule in expected.rules:
        if rule not in info.rules:
            yield f"it does not know the acceptance rule {rule!r}"


def _short(digest: str) -> str:
    return f"{digest[:SHOWN_DIGITS]}…" if digest else "none"
