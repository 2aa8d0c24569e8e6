"""The SLM as two static graphs over K/V rings, in its own ids (`GraphSlm`) or in the verifier's (`BridgedSlm`).

K/V leave the graphs in the ring's own encoding, so accepted rows are copied as bytes (HyCo, §3.4 and Appendix A).

Legend: R rows of a pass, n rows in use, W ring slots, H hidden, C kept tokens, N kv heads, d head dim.
"""

from collections.abc import Mapping
from itertools import groupby
from typing import NamedTuple

import numpy as np

from hyco_export.core.device_spec import GraphSession, GraphSpec, SlmSpec, to_integers
from hyco_export.core.encodings import Encoding
from hyco_export.core.network.host import EmbeddingRows, SlmInputs
from hyco_export.core.numerics import log_softmax_rows
from hyco_export.core.token_bridge import TokenBridge
from hyco_export.device.interfaces import SlmDevice
from hyco_export.protocol.tree import ROOT


class _Pass(NamedTuple):
    """K/V outputs of a tree pass whose first row has this number."""

    first_row: int
    row_count: int
    kv: Mapping[str, np.ndarray]


class GraphSlm:
    """interfaces.SlmDevice over a tree graph and a prefill graph.

    Args:
        spec: the SLM artifact.
        embeddings: embedding rows of any token id, scaled.
        tree: runs `spec.tree`.
        prefill: runs `spec.prefill`.
        sink: K/V rows [N, 1, d] of `spec.opening_token` in the rings' encodings, by ring; empty if there is none.
    """

    def __init__(
        self,
        spec: SlmSpec,
        embeddings: EmbeddingRows,
        tree: GraphSession,
        prefill: GraphSession,
        sink: Mapping[str, np.ndarray] | None = None,
    ) -> None:
        self.spec = spec
        self._tree = tree
        self._prefill = prefill
        self._sink = sink or {}
        names = [f"{kind}.{layer.index}" for layer in spec.layers for kind in ("k", "v")]
        empty = {name: spec.tree.input(name).zeros() for name in names}
        self._inputs = SlmInputs(spec, embeddings, empty, spec.mask_value, per_layer=spec.per_layer_width > 0)
        self._passes: list[_Pass] = []  # whose rows may still be committed, oldest first
        self._next_row = 0

    @property
    def rows(self) -> int:
        """R of a tree pass."""
        return self.spec.rows

    @property
    def context(self) -> int:
        """Slots of the largest ring."""
        return max(self.spec.rings.values())

    @property
    def length(self) -> int:
        """Positions committed so far, those skipped by `reset` included."""
        return self._inputs.length

    @property
    def next_row(self) -> int:
        """Number of the first row of the next tree pass."""
        return self._next_row

    def fits(self, tokens: np.ndarray, others: int) -> bool:
        """Can one pass hold these tokens [n] beside `others` rows."""
        return len(tokens) + others <= self.rows

    def reset(self, position: int = 0) -> None:
        """Empty the rings; the next position is `position`, and earlier ones are never seen."""
        self._inputs.reset(position)
        self._passes.clear()

    def prefill(self, tokens: np.ndarray) -> None:
        """Append tokens [n] to the rings, in as many passes as they need; a kept sink is copied, not run."""
        if self._sink and not self.length and len(tokens) and tokens[0] == self.spec.opening_token:
            self._inputs.store_sink(self._sink)
            tokens = tokens[1:]
        for start in range(0, len(tokens), self.spec.prefill_rows):
            chunk = tokens[start : start + self.spec.prefill_rows]
            parents = np.arange(ROOT, ROOT + len(chunk))  # each token is the child of the one before
            feeds = self._feeds(self.spec.prefill, self.spec.prefill_rows, chunk, parents)
            self._inputs.commit(self._prefill.run(feeds), np.arange(len(chunk)))

    def tree_pass(self, tokens: np.ndarray, parents: np.ndarray) -> np.ndarray:
        """log q float32 [n, C] over the keep set for a forest of n <= R rows on top of the rings.

        Rows are numbered on from pass to pass, the first of this one is `next_row`: `commit` takes these numbers.

        Raises:
            ValueError: more rows than the pass has.
        """
        if len(tokens) > self.rows:
            raise ValueError(f"{len(tokens)} rows, a pass of this SLM has {self.rows}")
        outputs = self._tree.run(self._feeds(self.spec.tree, self.rows, tokens, parents))
        kv = {name: array for name, array in outputs.items() if name != "logits"}
        self._passes.append(_Pass(self._next_row, len(tokens), kv))
        self._next_row += len(tokens)
        logits = outputs["logits"][: len(tokens)]
        encoding = self.spec.tree.output("logits").encoding
        assert encoding is not None  # logits are quantised
        return log_probs_of(logits, encoding)

    def commit(self, rows: np.ndarray) -> None:
        """Copy the K/V of these rows into the rings: a path in depth order, from the rings' end on, of any passes."""
        for place, numbers in groupby((int(row) for row in rows), self._place):
            chosen = self._passes[place]
            self._inputs.commit(chosen.kv, np.array(list(numbers)) - chosen.first_row)

    def forget(self, before: int) -> None:
        """Rows numbered below `before` will not be committed: free the passes that hold no others."""
        self._passes = [one for one in self._passes if one.first_row + one.row_count > before]

    def _place(self, row: int) -> int:
        """Index of the pass that row came from."""
        for place, one in enumerate(self._passes):
            if one.first_row <= row < one.first_row + one.row_count:
                return place
        raise ValueError(f"row {row} belongs to no pass that is remembered")

    def close(self) -> None:
        """Release both graphs."""
        self._tree.close()
        self._prefill.close()

    def _feeds(self, graph: GraphSpec, rows: int, tokens: np.ndarray, parents: np.ndarray) -> dict[str, np.ndarray]:
        """Integers of a pass of R `rows`, for the inputs that `graph` has: prefill ends at the last layer that stores
        K/V, and lacks some of the tree graph's."""
        real = self._inputs.real(tokens, parents.tolist(), rows)
        feeds = to_integers([spec for spec in graph.inputs if spec.name in real], real)
        return feeds | {spec.name: self._inputs.rings[spec.name] for spec in graph.inputs if spec.name not in real}


def log_probs_of(integers: np.ndarray, encoding: Encoding) -> np.ndarray:
    """log q float32 [n, C] of a graph's logits, integers [n, C] of `encoding`; the zero point cancels out.

    Equal integers stay equal, and larger ones larger for scales above 2e-6: below, float32 holds no such step.
    """
    return log_softmax_rows(integers.astype(np.float32), encoding.scale)


class BridgedSlm:
    """interfaces.SlmDevice in verifier ids; columns of `tree_pass` are those of the bridge.

    A pass that begins with a committed token (feeds do that until the root is in the rings) may be too long for one:
    its first token's leading pieces then go into the rings before it. Rows at the end that do not fit are not
    forwarded; their children get uniform probabilities.

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
        """log q [n, C] for a forest of verifier tokens on top of the rings; parents as in `interfaces.SlmDevice`."""
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
