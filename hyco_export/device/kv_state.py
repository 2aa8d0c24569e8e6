"""What the device takes from a reply: its ids and verdict, checked; e, h and K/V rows for the head.

`ids` are all committed token ids; the last one is the root, at position len(ids) - 1.
"""

from collections.abc import Sequence

import numpy as np

from hyco_export.core.handoff import HandoffSpec
from hyco_export.device.interfaces import ID_LIMIT, Given, HeadDevice, HeadDraft
from hyco_export.errors import ProtocolError
from hyco_export.protocol import wire
from hyco_export.protocol.tree import ROOT, Tree
from hyco_export.protocol.wire import Handoff


def check_ids(ids: Sequence[int], vocab_size: int = ID_LIMIT) -> None:
    """Check ids that a server sent, before they reach the device's models.

    Raises:
        ProtocolError: code token_range.
    """
    for token in ids:
        if not 0 <= token < vocab_size:
            raise ProtocolError("token_range", f"the server sent the token {token}, which is outside [0, {vocab_size})")


def check_reply(reply: wire.VerifyReply, number: int, tree: Tree) -> None:
    """Check that a verdict is about the round and tree that were sent: a wrong one would spoil every later round.

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
    if reply.drafted and not tree.tokens:  # rows of the server's own chain: the device cannot check them
        return
    if not reply.finished and len(reply.tokens) != len(reply.accepted) + 1:
        seen = f"{len(reply.tokens)} tokens for {len(reply.accepted)} accepted rows"
        raise ProtocolError("path_mismatch", f"round {number}: {seen}, expected one more")
    parent = ROOT
    for depth, (row, token) in enumerate(zip(reply.accepted, reply.tokens, strict=False), start=1):
        if not 0 <= row < len(tree.tokens) or tree.parents[row] != parent or tree.tokens[row] != token:
            raise ProtocolError("path_mismatch", f"round {number}: accepted row {row} is off the path at depth {depth}")
        parent = row


class HeadState:
    """Takes hand-offs, keeps the newest e(root) and h, fills the head's ring, drafts.

    Args:
        head: the head with its ring.
        spec: sizes and layout of the hand-off.
    """

    def __init__(self, head: HeadDevice, spec: HandoffSpec) -> None:
        self._head = head
        self._spec = spec
        self._e = np.zeros(spec.hidden, np.uint8)
        self._h = np.zeros(spec.hidden, np.uint8)
        self._next_position = 0
        self._oldest = 0  # position of the oldest row since the session began

    def begin(self, ids: Sequence[int], given: Given) -> None:
        """Start from PRIME's hand-off: its rows are the newest positions before the root.

        Raises:
            ProtocolError: see `observe`.
        """
        self._head.reset()
        self._next_position = self._oldest = given.handoff.first_position if given.handoff else 0
        self.observe(ids, given)

    def observe(self, ids: Sequence[int], given: Given) -> None:
        """Copy a reply's rows into the ring; they must end right before the root and leave no hole in the window.

        Raises:
            ProtocolError: codes handoff_missing, handoff_size, handoff_gap.
        """
        handoff = given.handoff
        if handoff is None:
            raise ProtocolError(
                "handoff_missing",
                "the server sent no hand-off",
                "start the server on the run folder with the head artifact",
            )
        if len(handoff.e) != self._spec.hidden or len(handoff.h) != self._spec.hidden:
            seen = f"e of {len(handoff.e)} B and h of {len(handoff.h)} B"
            raise ProtocolError("handoff_size", f"{seen}, the head takes {self._spec.hidden} B each")
        try:
            rows = self._spec.unpack_rows(handoff.kv)
        except ValueError as error:
            raise ProtocolError("handoff_size", str(error)) from error
        root_position = len(ids) - 1
        whole = handoff.first_position == self._next_position or rows.count >= self._spec.window
        if not whole or handoff.first_position + rows.count != root_position:
            raise ProtocolError(
                "handoff_gap",
                f"K/V rows of positions {handoff.first_position} to {handoff.first_position + rows.count - 1}, "
                f"expected {self._next_position} to {root_position - 1}",
            )
        self._head.commit(rows, handoff.first_position)
        self._next_position = root_position
        if handoff.older_kv:
            self._take_older(handoff, root_position)
        self._e = np.frombuffer(handoff.e, np.uint8)
        self._h = np.frombuffer(handoff.h, np.uint8)

    def _take_older(self, handoff: Handoff, root_position: int) -> None:
        """Rows of the first window that came late; those that have left the window meanwhile are dropped."""
        skipped = max(0, root_position - self._spec.window - handoff.older_first)
        count, rest = divmod(len(handoff.older_kv), self._spec.row_bytes)
        if rest or handoff.older_first + count != self._oldest:
            raise ProtocolError(
                "handoff_gap",
                f"{len(handoff.older_kv)} B of older K/V rows from position {handoff.older_first}, "
                f"expected rows that end at {self._oldest - 1}",
            )
        if skipped < count:
            rows = self._spec.unpack_rows(handoff.older_kv[skipped * self._spec.row_bytes :])
            self._head.commit(rows, handoff.older_first + skipped)
        self._oldest = handoff.older_first

    def draft(self) -> HeadDraft:
        """The head's chain and runner-ups under the root."""
        return self._head.draft(self._e, self._h, self._next_position)


class ReplyChain:
    """The chain that the server's head drafted and sent with its reply; no runner-ups."""

    def __init__(self) -> None:
        self._chain: tuple[int, ...] = ()

    def begin(self, ids: Sequence[int], given: Given) -> None:
        """Take up the chain under the root."""
        self._chain = given.chain

    def observe(self, ids: Sequence[int], given: Given) -> None:
        """The same under the new root."""
        self._chain = given.chain

    def draft(self) -> HeadDraft:
        return HeadDraft(self._chain, ())
