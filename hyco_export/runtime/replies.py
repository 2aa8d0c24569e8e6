"""What a device checks of a verdict before it believes it. Pure; knows the wire's messages and trees."""

from hyco_export.errors import ProtocolError
from hyco_export.runtime import wire
from hyco_export.runtime.tree import ROOT, Tree


def check_reply(reply: wire.VerifyReply, number: int, tree: Tree) -> None:
    """A verdict must be about the round and the tree that were sent: a wrong one would poison every later round.

    Raises:
        ProtocolError: codes round_mismatch, empty_round, path_mismatch.
    """
    if reply.round != number:
        raise ProtocolError("round_mismatch", f"reply to round {reply.round}, sent round {number}")
    if not reply.tokens:
        raise ProtocolError("empty_round", f"round {number} committed no token")
    if reply.drafted:  # the server's own chain: its rows are not ours to check
        return
    if not reply.finished and len(reply.tokens) != len(reply.accepted) + 1:
        seen = f"{len(reply.tokens)} tokens for {len(reply.accepted)} accepted rows"
        raise ProtocolError("path_mismatch", f"round {number}: {seen}, expected one more")
    parent = ROOT
    for depth, (row, token) in enumerate(zip(reply.accepted, reply.tokens, strict=False), start=1):
        if not 0 <= row < len(tree) or tree.parents[row] != parent or tree.tokens[row] != token:
            raise ProtocolError("path_mismatch", f"round {number}: accepted row {row} is off the path at depth {depth}")
        parent = row
