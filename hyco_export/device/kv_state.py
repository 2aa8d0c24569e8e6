"""What keeps the device's two models in step with the committed ids: hand-offs for the head, tokens for the SLM.

Drafters are built from these. Knows the ports, the hand-off layout and positions; no scores and no wire calls.

Legend: C kept tokens. `ids` are all committed ids; the last one is the root, at len(ids) - 1.
"""

from collections.abc import Sequence

import numpy as np

from hyco_export.core.device_spec import GraphSpec, TensorSpec
from hyco_export.core.handoff import HandoffSpec
from hyco_export.core.ring import EMPTY, slot_positions, slots
from hyco_export.device.interfaces import Given, HeadDevice, HeadDraft, SlmDevice
from hyco_export.errors import ProtocolError
from hyco_export.protocol.tree import ROOT, Tree, path_to
from hyco_export.protocol.wire import Handoff


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


class SlmFeed:
    """Keeps the SLM's rings at the committed ids and forwards nodes of a tree on top of them.

    A pass has up to `slm.rows` rows: the tokens between the rings' end and the tree (catch-up, such as an accepted SLM
    leaf, then the root), and the nodes with their ancestors: static graphs see the rings and the rows of their own
    pass, so ancestors are fed again in every pass. The root is committed right after its first pass, which leaves all
    rows of further ones to nodes.
    """

    def __init__(self, slm: SlmDevice) -> None:
        self._slm = slm

    @property
    def rows(self) -> int:
        """Rows of one pass."""
        return self._slm.rows

    def begin(self, ids: Sequence[int]) -> None:
        """Prefill what the rings can hold of the ids before the root (HyCo, §3.4); positions stay absolute."""
        root_position = len(ids) - 1
        start = max(0, root_position - self._slm.context)
        self._slm.reset(start)
        self._slm.prefill(np.asarray(ids[start:root_position], dtype=np.int64))

    def base(self, ids: Sequence[int], nodes: int) -> tuple[int, ...]:
        """Committed ids that are not in the rings yet, the root last.

        Those before the root are prefilled where they would not fit into one pass beside it and `nodes` others.
        """
        missing = tuple(ids[self._slm.length :])
        if not self._slm.fits(np.asarray(missing, dtype=np.int64), nodes):
            self._slm.prefill(np.asarray(missing[:-1], dtype=np.int64))
            return missing[-1:]
        return missing

    def forward(self, base: Sequence[int], tree: Tree, nodes: Sequence[int]) -> tuple[np.ndarray, range, list[int]]:
        """One pass over `base` (a line of tokens from the rings' end to the tree's root) and `nodes` with ancestors.

        `nodes` are rows of `tree`; ROOT is the end of `base`, which must then not be empty.

        Returns:
            log q [len(nodes), C] of the kept tokens; numbers of the rows of `base`, and of `nodes`, for `commit`.
        """
        closure = sorted({row for node in nodes for row in path_to(tree.parents, node)})
        place = {ROOT: len(base) - 1} | {row: len(base) + index for index, row in enumerate(closure)}
        tokens = [*base, *(tree.tokens[row] for row in closure)]
        parents = [*range(ROOT, len(base) - 1), *(place[tree.parents[row]] for row in closure)]
        first = self._slm.next_row
        log_probs = self._slm.tree_pass(np.asarray(tokens, dtype=np.int64), np.asarray(parents, dtype=np.int64))
        asked = [place[node] for node in nodes]
        return log_probs[asked], range(first, first + len(base)), [first + row for row in asked]

    def commit(self, rows: Sequence[int]) -> None:
        """Keep these rows of earlier passes: a path from the rings' end on."""
        if len(rows):
            self._slm.commit(np.asarray(rows, dtype=np.int64))

    def forget(self, before: int | None = None) -> None:
        """No row numbered below `before` is committed any more; None: no row of any pass so far."""
        self._slm.forget(self._slm.next_row if before is None else before)


# K/V rings as the bytes that the graphs read: the host copies integers and never converts them.


class KvRing:
    """K and V of one layer, uint8 [N, W, d] each, in the encodings of the graph inputs `k.<name>` and `v.<name>`."""

    def __init__(self, graph: GraphSpec, name: str) -> None:
        self._specs = {f"{kind}.{name}": graph.input(f"{kind}.{name}") for kind in ("k", "v")}
        self._name = name
        self.capacity = self._specs[f"k.{name}"].shape[1]
        self.arrays = {key: _zeros(spec) for key, spec in self._specs.items()}

    def clear(self) -> None:
        """Back to 0.0 everywhere."""
        self.arrays = {key: _zeros(spec) for key, spec in self._specs.items()}

    def write(self, first_position: int, k: np.ndarray, v: np.ndarray) -> None:
        """Put k, v [N, n, d] of positions first_position ... into their slots."""
        places = slots(first_position, k.shape[1], self.capacity)  # of more than W rows numpy leaves the last W
        self.arrays[f"k.{self._name}"][:, places] = k
        self.arrays[f"v.{self._name}"][:, places] = v


def held_positions(first: int, length: int, capacity: int) -> np.ndarray:
    """Position in each slot [W] after `first` .. length - 1 were written; EMPTY where there is none."""
    positions = slot_positions(length, capacity)
    return np.where(positions < first, EMPTY, positions)


def _zeros(spec: TensorSpec) -> np.ndarray:
    zero = spec.encoding.zero_point if spec.encoding else 0
    return np.full(spec.shape, zero, spec.dtype)
