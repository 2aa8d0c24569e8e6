"""An SLM with another tokenizer, driven with the verifier's ids: every token becomes the SLM's own, as bytes say.

Wraps a `ports.SlmDevice` of the SLM's ids in one of the verifier's, so that feeds and drafters know nothing of it. One
verifier token may take several rows of a pass. Legend: n verifier tokens given, C mapped tokens.
"""

import numpy as np

from hyco_export.core.token_bridge import TokenBridge
from hyco_export.runtime.ports import SlmDevice
from hyco_export.runtime.tree import ROOT

NOTHING = -np.inf  # log-probability of every child of a row that did not fit


class BridgedSlm:
    """ports.SlmDevice in verifier ids; columns of `tree_pass` are those of the bridge.

    The first row of a pass must be a committed token (feeds begin with the committed line): when a pass is too long its
    leading pieces go into the rings before the pass. Rows at the end that do not fit then get no children.

    Args:
        slm: the SLM in its own ids, whose output layer has the bridge's columns.
        bridge: the map.
    """

    def __init__(self, slm: SlmDevice, bridge: TokenBridge) -> None:
        self._slm = slm
        self._bridge = bridge
        self._length = 0
        self._ahead = 0  # pieces of the next committed token that are in the rings already
        self._own_rows: list[range] = []  # rows of the SLM's last pass, by row of ours

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

    def reset(self, position: int = 0) -> None:
        """Empty the rings; the next verifier position is `position`. The SLM's own are counted from there."""
        self._slm.reset(position)
        self._length, self._ahead, self._own_rows = position, 0, []

    def fits(self, tokens: np.ndarray) -> bool:
        """Can one pass hold all pieces of these tokens [n]."""
        return sum(len(self._bridge.read(int(token))) for token in tokens) - self._ahead <= self.rows

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
        own_rows: list[range] = []
        for pieces, parent in zip(read, map(int, parents), strict=True):
            before = ROOT if parent == ROOT else self._last(own_rows[parent])
            first = len(own_tokens)
            room = first + len(pieces) <= self.rows and (parent == ROOT or len(own_rows[parent]) > 0)
            own_rows.append(range(first, first + len(pieces)) if room else range(0))
            if room:
                own_tokens += pieces.tolist()
                own_parents += [before, *range(first, first + len(pieces) - 1)]
        found = self._slm.tree_pass(np.array(own_tokens, dtype=np.int64), np.array(own_parents, dtype=np.int64))
        self._own_rows = own_rows
        result = np.full((len(tokens), found.shape[1]), NOTHING, dtype=found.dtype)
        for row, own in enumerate(own_rows):
            if own:
                result[row] = found[own[-1]]
        return result

    def commit(self, rows: np.ndarray) -> None:
        """Keep these rows of the last pass (a path, depth order); those that did not fit are prefilled by the next."""
        own = [self._own_rows[int(row)] for row in rows]
        whole = own[: next((place for place, found in enumerate(own) if not found), len(own))]
        self._slm.commit(np.array([row for found in whole for row in found], dtype=np.int64))
        self._length += len(whole)
        self._ahead, self._own_rows = 0, []

    def close(self) -> None:
        """Release the SLM."""
        self._slm.close()

    def _shortened(self, pieces: np.ndarray) -> np.ndarray:
        """Pieces of the first row that are not in the rings yet, at most a pass; what is too long goes there now."""
        rest = pieces[self._ahead :]
        surplus = max(0, len(rest) - self.rows)
        if surplus:
            self._slm.prefill(rest[:surplus])
            self._ahead += surplus
        return rest[surplus:]

    @staticmethod
    def _last(rows: range) -> int:
        return rows[-1] if rows else ROOT
