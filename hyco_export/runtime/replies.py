"""What a device checks of a reply before it believes it. Pure; knows the wire's messages and trees."""

from collections.abc import Sequence

from hyco_export.errors import ProtocolError
from hyco_export.runtime import wire
from hyco_export.runtime.tree import ROOT, Tree

ID_LIMIT = 1 << 31  # of every token id: the digest of committed ids takes them as int32


def check_ids(ids: Sequence[int], vocab_size: int = ID_LIMIT) -> None:
    """Ids that a server sent, before they reach the device's models.

    Raises:
        ProtocolError: code token_range.
    """
    for token in ids:
        if not 0 <= token < vocab_size:
            raise ProtocolError("token_range", f"the server sent the token {token}, which is outside [0, {vocab_size})")


def check_reply(reply: wire.VerifyReply, number: int, tree: Tree) -> None:
    """A verdict must be about the round and the tree that were sent: a wrong one would poison every later round.

    Raises:
        ProtocolError: codes round_mismatch, empty_round, path_mismatch.
    """
    if reply.round != number:
        raise ProtocolError("round_mismatch", f"reply to round {reply.round}, sent round {number}")
    if not reply.tokens:
        raise ProtocolError("empty_round", f"round {number} committed no token")
    if len(reply.drawn) != len(reply.accepted):
        seen = f"{len(reply.drawn)} draws for {len(reply.accepted)} accepted rows"
        raise ProtocolError("path_mismatch", f"round {number}: {seen}")
    if reply.drafted and not len(tree):  # the server's own chain: its rows are not ours to check
        return
    if not reply.finished and len(reply.tokens) != len(reply.accepted) + 1:
        seen = f"{len(reply.tokens)} tokens for {len(reply.accepted)} accepted rows"
        raise ProtocolError("path_mismatch", f"round {number}: {seen}, expected one more")
    parent = ROOT
    for depth, (row, token) in enumerate(zip(reply.accepted, reply.tokens, strict=False), start=1):
        if not 0 <= row < len(tree) or tree.parents[row] != parent or tree.tokens[row] != token:
            raise ProtocolError("path_mismatch", f"round {number}: accepted row {row} is off the path at depth {depth}")
        parent = row
