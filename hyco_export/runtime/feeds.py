"""What keeps the device's two models in step with the committed ids: hand-offs for the head, tokens for the SLM.

Drafters are built from these two. Knows the ports, the hand-off layout and positions; no scores and no wire calls.

Legend: P nodes of a tree, C kept tokens. `ids` are all committed ids; the last one is the root, at len(ids) - 1.
"""

from collections.abc import Sequence

import numpy as np

from hyco_export.core.handoff import HandoffSpec
from hyco_export.errors import ProtocolError
from hyco_export.runtime.ports import HeadDevice, HeadDraft, SlmDevice
from hyco_export.runtime.tree import ROOT, Tree
from hyco_export.runtime.wire import Handoff


class HeadFeed:
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

    def begin(self, ids: Sequence[int], handoff: Handoff | None) -> None:
        """Start from PRIME's hand-off: its rows are the newest positions before the root.

        Raises:
            ProtocolError: see `observe`.
        """
        self._head.reset()
        self._next_position = self._oldest = handoff.first_position if handoff else 0
        self.observe(ids, handoff)

    def observe(self, ids: Sequence[int], handoff: Handoff | None) -> None:
        """Copy a reply's rows into the ring; they must end right before the root and leave no hole in the window.

        Raises:
            ProtocolError: codes handoff_missing, handoff_size, handoff_gap.
        """
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


class SlmFeed:
    """Keeps the SLM's rings at the committed ids and expands a planted tree in one pass.

    A pass has up to `slm.rows` rows: catch-up rows (committed tokens that are not in the rings yet, such as an accepted
    SLM leaf), the root, and the planted nodes. Catch-up that does not fit beside the others is prefilled instead.
    """

    def __init__(self, slm: SlmDevice) -> None:
        self._slm = slm
        self._root_row = 0  # of the last pass; the rows before it are catch-up

    def begin(self, ids: Sequence[int]) -> None:
        """Prefill what the rings can hold of the ids before the root (HyCo, §3.4); positions stay absolute."""
        root_position = len(ids) - 1
        start = max(0, root_position - self._slm.context)
        self._slm.reset(start)
        self._slm.prefill(np.asarray(ids[start:root_position], dtype=np.int64))

    def expand(self, ids: Sequence[int], planted: Tree) -> np.ndarray:
        """log q [1 + P, C] of the kept tokens after the root and after every planted node."""
        root_position = len(ids) - 1
        room = self._slm.rows - 1 - len(planted)
        if root_position - self._slm.length > room:
            self._slm.prefill(np.asarray(ids[self._slm.length : root_position], dtype=np.int64))
        line = ids[self._slm.length :]  # catch-up tokens, then the root: each the child of the one before
        self._root_row = len(line) - 1
        tokens = [*line, *planted.tokens]
        parents = [*range(-1, self._root_row), *(self._pass_row(parent) for parent in planted.parents)]
        log_probs = self._slm.tree_pass(np.asarray(tokens, dtype=np.int64), np.asarray(parents, dtype=np.int64))
        return log_probs[self._root_row : self._root_row + 1 + len(planted)]

    def commit(self, accepted_planted: Sequence[int]) -> None:
        """Keep the last pass' catch-up rows, its root and these planted nodes (a path); the rest is discarded."""
        path = [*range(self._root_row + 1), *(self._pass_row(node) for node in accepted_planted)]
        self._slm.commit(np.asarray(path, dtype=np.int64))

    def _pass_row(self, node: int) -> int:
        return self._root_row if node == ROOT else self._root_row + 1 + node
