"""An SLM with another tokenizer, driven with the verifier's ids: every token becomes the SLM's own, as bytes say.

Wraps a `ports.SlmDevice` of the SLM's ids in one of the verifier's, so that feeds and drafters know nothing of it. One
verifier token may take several rows of a pass. Legend: n verifier tokens given, C mapped tokens.
"""

import numpy as np

from hyco_export.core.token_bridge import TokenBridge
from hyco_export.runtime.ports import SlmDevice
from hyco_export.runtime.tree import ROOT


class BridgedSlm:
    """ports.SlmDevice in verifier ids; columns of `tree_pass` are those of the bridge.

    A pass that begins with a committed token (feeds do that until the root is in the rings) may be too long for one:
    its first token's leading pieces then go into the rings before it. Rows at the end that do not fit are not
    forwarded: nothing is known of their children.

    Args:
        slm: the SLM in its own ids, whose output layer has the bridge's columns.
        bridge: the map.
    """

    def __init__(self, slm: SlmDevice, bridge: TokenBridge) -> None:
        self._slm = slm
        self._bridge = bridge
        self._length = 0
        self._next_row = 0
        self._ahead = 0  # pieces of the next committed token that are in the rings already
        self._own_rows: dict[int, range] = {}  # numbers of the SLM's rows, by number of ours; empty: not forwarded

    @property
    def rows(self) -> int:
        """Rows of one tree pass, where every token is one of the SLM's."""
        return self._slm.rows

    @property
    def context(self) -> int:
        """Newest verifier positions worth prefilling: each takes at least one of the SLM's."""
        return self._slm.context

    @property
    def length(self) -> int:
        """Verifier positions committed so far, those skipped by `reset` included."""
        return self._length

    @property
    def next_row(self) -> int:
        """Number of the first row of the next pass."""
        return self._next_row

    def fits(self, tokens: np.ndarray, others: int) -> bool:
        """Can one pass hold the pieces of these tokens [n] beside `others` rows."""
        return sum(len(self._bridge.read(int(token))) for token in tokens) - self._ahead + others <= self.rows

    def reset(self, position: int = 0) -> None:
        """Empty the rings; the next verifier position is `position`. The SLM's own are counted from there."""
        self._slm.reset(position)
        self._length, self._ahead = position, 0
        self._own_rows.clear()

    def prefill(self, tokens: np.ndarray) -> None:
        """Append verifier tokens [n]."""
        self._slm.prefill(self._bridge.read_all(tokens)[self._ahead :])
        self._length += len(tokens)
        self._ahead = 0

    def tree_pass(self, tokens: np.ndarray, parents: np.ndarray) -> np.ndarray:
        """log q [n, C] for a forest of verifier tokens on top of the rings; parents as in `ports.SlmDevice`."""
        read = [self._bridge.read(int(token)) for token in tokens]
        read[0] = self._shortened(read[0])
        own_tokens: list[int] = []
        own_parents: list[int] = []
        ends: list[int | None] = []  # row in this pass that holds the last piece of each token
        first_own = self._slm.next_row
        for pieces, parent in zip(read, map(int, parents), strict=True):
            before = ROOT if parent == ROOT else ends[parent]
            first, count = len(own_tokens), len(pieces)
            fits = before is not None and first + count <= self.rows
            ends.append(first + count - 1 if fits else None)
            self._own_rows[self._next_row] = range(first_own + first, first_own + first + count * fits)
            self._next_row += 1
            if before is not None and fits:
                own_tokens += pieces.tolist()
                own_parents += [before, *range(first, first + count - 1)]
        found = self._slm.tree_pass(np.array(own_tokens, dtype=np.int64), np.array(own_parents, dtype=np.int64))
        unknown = np.full(found.shape[1], -np.log(found.shape[1]), dtype=found.dtype)
        return np.stack([unknown if end is None else found[end] for end in ends])

    def commit(self, rows: np.ndarray) -> None:
        """Keep these rows (a path from the rings' end on) up to the first that was not forwarded.

        What is left out is missing from `length`, and so comes again as committed tokens.
        """
        own = [self._own_rows[int(row)] for row in rows]
        whole = next((place for place, found in enumerate(own) if not found), len(own))
        if whole:
            self._slm.commit(np.array([row for found in own[:whole] for row in found], dtype=np.int64))
            self._length += whole
            self._ahead = 0

    def forget(self, before: int) -> None:
        """Rows numbered below `before` will not be committed any more."""
        self._own_rows = {row: own for row, own in self._own_rows.items() if row >= before}
        kept = [own.start for own in self._own_rows.values() if own]
        self._slm.forget(min(kept, default=self._slm.next_row))

    def close(self) -> None:
        """Release the SLM."""
        self._slm.close()

    def _shortened(self, pieces: np.ndarray) -> np.ndarray:
        """Pieces of a pass' first token that are not in the rings yet, at most a pass; others go there now."""
        rest = pieces[self._ahead :]
        surplus = max(0, len(rest) - self.rows)
        if surplus:
            self._slm.prefill(rest[:surplus])
            self._ahead += surplus
        return rest[surplus:]
