"""A draft tree while the SLM grows it: which nodes were forwarded, what they cost in rows, what follows a verdict.

Shared by all drafters that use the SLM. Knows scoring and the SLM's feed; not the head and not the wire.

Legend: C kept tokens.
"""

import time
from collections.abc import Collection, Sequence

import msgspec
import numpy as np

from hyco_export.core.units import MS_PER_S
from hyco_export.runtime.feeds import SlmFeed
from hyco_export.runtime.scoring import add_candidates, best_columns, trim
from hyco_export.runtime.tree import EMPTY_TREE, ROOT, Tree, path_to


class Edges(msgspec.Struct, frozen=True):
    """How children are scored: score(parent) + edge_log_prob + log q; `per_row` best children of a node.

    `temperature`: of q, the SLM's softmax over the keep set; a reading, the paper names none.
    """

    edge_log_prob: float
    per_row: int
    temperature: float = 1.0


class Growth:
    """A tree under one root.

    Args:
        feed: the SLM.
        keep_ids: [C] verifier ids of the columns of the SLM's log-probabilities.
        stop_ids: tokens after which nothing is drafted.
        base: tokens from the rings' end to the root, the root last.
        planted: nodes that others drafted.
    """

    def __init__(
        self,
        feed: SlmFeed,
        keep_ids: np.ndarray,
        stop_ids: Collection[int],
        base: Sequence[int],
        planted: Tree = EMPTY_TREE,
    ) -> None:
        self.tree = planted
        self.base = tuple(base)
        self.base_rows: range = range(0)  # numbers of the base's rows, once they were forwarded
        self.slm_ms = 0.0  # of all passes
        self._feed = feed
        self._keep_ids = keep_ids
        self._stop_ids = stop_ids
        self._rows: dict[int, int] = {}  # forwarded node -> number of its row
        self._after: dict[int, np.ndarray] = {}  # forwarded node -> log q [C]

    def unexpanded(self) -> tuple[int, ...]:
        """Nodes that may get children and have not been forwarded: the root, then the best first."""
        if ROOT not in self._rows:
            return (ROOT, *range(len(self.tree)))
        nodes = [
            node
            for node, token in enumerate(self.tree.tokens)
            if node not in self._rows and token not in self._stop_ids
        ]
        return tuple(sorted(nodes, key=lambda node: (-self.tree.log_probs[node], node)))

    def fitting(self, nodes: Sequence[int]) -> tuple[int, ...]:
        """Those of `nodes`, first ones first, that fit into one pass with the base and their ancestors."""
        used: set[int] = set()
        chosen = []
        for node in nodes:
            wider = used | set(path_to(self.tree.parents, node))
            if len(self.base) + len(wider) <= self._feed.rows:
                used = wider
                chosen.append(node)
        return tuple(chosen)

    def expand(self, nodes: Sequence[int], edges: Edges) -> None:
        """One pass: forward `nodes` and append their best children."""
        log_probs = tempered(self.forward(nodes), edges.temperature)
        self.tree = add_candidates(
            self.tree, nodes, log_probs, self._keep_ids, edges.edge_log_prob, edges.per_row, self._stop_ids
        )

    def forward(self, nodes: Sequence[int]) -> np.ndarray:
        """One pass without new children: log q [len(nodes), C]."""
        if ROOT in nodes and not self.base:
            raise RuntimeError("the root is in the rings already: its own pass is over")
        started = time.perf_counter()
        log_probs, base_rows, rows = self._feed.forward(self.base, self.tree, nodes)
        self.slm_ms += (time.perf_counter() - started) * MS_PER_S
        if not self.base_rows:
            self.base_rows = base_rows
        self._rows |= dict(zip(nodes, rows, strict=True))
        self._after |= dict(zip(nodes, log_probs, strict=True))
        return log_probs

    def settle_base(self) -> None:
        """The base is committed text: keep its rows, so that further passes need not feed it."""
        self._feed.commit(self.base_rows)
        self.base = ()

    def trim(self, budget: int) -> None:
        """Keep the `budget` best nodes."""
        self.tree, kept = trim(self.tree, budget)
        new_row = {ROOT: ROOT, **{node: place for place, node in enumerate(kept)}}
        self._rows = {new_row[node]: row for node, row in self._rows.items() if node in new_row}
        self._after = {new_row[node]: log_probs for node, log_probs in self._after.items() if node in new_row}

    def commit(self, path: Sequence[int]) -> None:
        """Keep the K/V of an accepted path as far as it was forwarded; what follows is caught up with later."""
        rows = []
        for node in path:
            if node not in self._rows:
                break
            rows.append(self._rows[node])
        self._feed.commit(rows)

    def best_guess(self) -> tuple[int, int] | None:
        """The leaf and the token after it with the best score, of the leaves that were forwarded; stops left out."""
        inner = set(self.tree.parents)
        guesses = []
        for node, log_probs in self._after.items():
            if node != ROOT and node not in inner and self.tree.tokens[node] not in self._stop_ids:
                token, log_q = self._best_follower(log_probs)
                guesses.append((self.tree.log_probs[node] + log_q, -node, token))
        if not guesses:
            return None
        _, negative, token = max(guesses)
        return -negative, token

    def oldest_row(self) -> int | None:
        """The smallest number of a row that may still be committed."""
        return min(self._rows.values(), default=None)

    def _best_follower(self, log_probs: np.ndarray) -> tuple[int, float]:
        """Best kept token that is no stop, and its log q, of log_probs [C]."""
        for column in best_columns(log_probs, len(self._stop_ids) + 1):
            if int(self._keep_ids[column]) not in self._stop_ids:
                return int(self._keep_ids[column]), float(log_probs[column])
        raise ValueError("the keep set holds nothing but stop tokens")


def tempered(log_probs: np.ndarray, temperature: float) -> np.ndarray:
    """log q [n, C] at another temperature."""
    if temperature == 1.0:
        return log_probs
    wide = log_probs.astype(np.float64) / temperature
    return (wide - np.logaddexp.reduce(wide, axis=1, keepdims=True)).astype(np.float32)
