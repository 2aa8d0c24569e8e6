"""The draft tree while it is built: the head's nodes, the SLM's passes over it, scores, and the cut to the budget.

Functions score and cut (HyCo, §3.1); `SlmState` keeps the SLM's rings at the committed ids; `TreeBuilder` joins them
for one root. All drafters that use the SLM build their trees here.

Legend: C kept tokens, P planted nodes, R expanded rows.
"""

import math
import time
from collections.abc import Collection, Iterable, Sequence

import msgspec
import numpy as np

from hyco_export.core.numerics import MS_PER_S, log_softmax_rows
from hyco_export.core.recipe import Drafting
from hyco_export.device.interfaces import SlmDevice
from hyco_export.protocol.tree import EMPTY_TREE, ROOT, Source, Tree, depths

GROUP_SIZE = 32  # columns a group: 16 to 64 took the same time for 32 of 86,089 columns
RUNNER_UP_EDGES = 2  # a runner-up pays the cost of a depth twice, which ranks it just below the chain token it doubles


def plant(
    chain: Sequence[int], runner_ups: Sequence[int], edge_log_prob: float, stop_ids: Collection[int] = ()
) -> Tree:
    """The head's part of the tree: its chain and the second-ranked tokens beside its first nodes.

    Args:
        chain: top-1 tokens of the head's steps, depth 1 first.
        runner_ups: second-ranked tokens of the first len(runner_ups) steps.
        edge_log_prob: L, the logarithm of the chain's acceptance per depth; below 0.
        stop_ids: nothing is planted under these tokens: generation ends there.

    Returns:
        Tree of P nodes; the chain node at depth d scores d * L, a runner-up score(parent) + 2 L.
    """
    tokens, parents, scores, sources = [], [], [], []
    for step, token in enumerate(chain):
        tokens.append(token)
        parents.append(step - 1 if step else ROOT)
        scores.append((step + 1) * edge_log_prob)
        sources.append(Source.CHAIN)
        if token in stop_ids:
            break
    planted_steps = len(tokens)
    for step, token in enumerate(runner_ups[:planted_steps]):
        if token == chain[step]:  # siblings are unique
            continue
        tokens.append(token)
        parents.append(step - 1 if step else ROOT)
        scores.append(step * edge_log_prob + RUNNER_UP_EDGES * edge_log_prob)
        sources.append(Source.RUNNER_UP)
    return Tree(tuple(tokens), tuple(parents), tuple(scores), tuple(sources))


def add_candidates(
    tree: Tree,
    rows: Sequence[int],
    log_probs: np.ndarray,
    token_ids: np.ndarray,
    edge_log_prob: float,
    per_row: int,
    stop_ids: Collection[int] = (),
) -> Tree:
    """`tree` with the SLM's children appended: child x of node v scores score(v) + L + log q(x|v).

    Args:
        tree: what is planted so far.
        rows: [R] expanded rows of `tree`; ROOT for the root, which scores 0.
        log_probs: [R, C] natural log q of the kept tokens after each of these rows.
        token_ids: [C] verifier ids, increasing.
        edge_log_prob: L, the cost of one depth; below 0.
        per_row: best children taken per row; ties by the smaller token id.
        stop_ids: rows that hold one of these tokens get no children.

    Returns:
        The larger tree. Of the best children those that `tree` already has under the same parent are dropped.
    """
    tokens, parents = list(tree.tokens), list(tree.parents)
    scores, sources = list(tree.log_probs), list(tree.sources)
    siblings = set(zip(tree.parents, tree.tokens, strict=True))
    for row, row_log_probs in zip(rows, log_probs, strict=True):
        if row != ROOT and tree.tokens[row] in stop_ids:
            continue
        base = edge_log_prob + (tree.log_probs[row] if row != ROOT else 0.0)
        for column in best_columns(row_log_probs, per_row):
            token = int(token_ids[column])
            if (row, token) in siblings:
                continue
            tokens.append(token)
            parents.append(row)
            scores.append(base + float(row_log_probs[column]))
            sources.append(Source.SLM)
    return Tree(tuple(tokens), tuple(parents), tuple(scores), tuple(sources))


def best_columns(values: np.ndarray, count: int) -> np.ndarray:
    """Columns of the `count` largest of values [C], best first; equal values by the smaller column.

    The maxima of C / GROUP_SIZE groups of columns come first: `count` groups reach the `count`-th largest maximum, so
    no smaller value is among the best. That leaves few of the paper's 86,089 columns to be sorted.
    """
    groups = len(values) // GROUP_SIZE
    if count > groups:
        columns = np.arange(len(values))
    else:
        maxima = values[: groups * GROUP_SIZE].reshape(GROUP_SIZE, groups).max(axis=0)  # of every groups-th column
        columns = np.flatnonzero(values >= _nth_largest(maxima, count))  # in column order, all ties among them
    found = values[columns]
    if count < len(columns):
        near = found >= _nth_largest(found, count)
        columns, found = columns[near], found[near]
    return columns[np.argsort(-found, kind="stable")][:count]


def _nth_largest(values: np.ndarray, count: int) -> float:
    """The `count`-th largest of values [n], 1 <= count <= n."""
    return float(np.partition(values, len(values) - count)[len(values) - count])


def ranking(tree: Tree, scores: Sequence[float] | np.ndarray) -> np.ndarray:
    """Rows [N] of the tree by scores [N], best first. Ties: smaller depth, then the order of `tree` (planted before
    candidates, then row, then rank)."""
    return np.lexsort((np.arange(len(tree.tokens)), depths(tree.parents), -np.asarray(scores)))


def trim(tree: Tree, budget: int, best_first: Sequence[int] | np.ndarray | None = None) -> tuple[Tree, tuple[int, ...]]:
    """The `budget` best nodes and their rows in `tree`, in the order of `tree`.

    Every edge costs at least |L|, so the best nodes are closed under ancestors by themselves: asserted, not repaired.

    best_first: rows of the best nodes by another score; None: by the tree's own.
    """
    count = len(tree.tokens)
    if count <= budget:
        return tree, tuple(range(count))
    rows = ranking(tree, tree.log_probs) if best_first is None else best_first
    kept = tuple(sorted(int(row) for row in rows[:budget]))
    new_row = {ROOT: ROOT, **{row: place for place, row in enumerate(kept)}}
    assert all(tree.parents[row] in new_row for row in kept), "a kept node lost its parent: an edge costs nothing"
    trimmed = Tree(
        tuple(tree.tokens[row] for row in kept),
        tuple(new_row[tree.parents[row]] for row in kept),
        tuple(tree.log_probs[row] for row in kept),
        tuple(tree.sources[row] for row in kept),
    )
    return trimmed, kept


class Edges(msgspec.Struct, frozen=True):
    """How children are scored: score(parent) + edge_log_prob + log q; `per_row` best children of a node.

    `temperature`: of q, the SLM's softmax over the keep set; a reading, the paper names none.
    """

    edge_log_prob: float
    per_row: int
    temperature: float = 1.0


class TreeRule(msgspec.Struct, frozen=True):
    """How a drafter builds its tree (HyCo, §3.1), worked out from the recipe's `drafting`."""

    edge_log_prob: float  # L: ln 0.66 in the paper, the chain's acceptance per depth
    budget: int  # nodes sent
    candidates_per_row: int  # the SLM's best children taken per expanded node
    temperature: float = 1.0  # of the SLM's distribution
    second_pass_nodes: int | None = None  # forwarded by a second pass, best first; None: all that have no children
    passes: int = 1  # of the SLM, at most
    counts_ahead: bool = False  # do passes made while a reply was on its way count among the next round's

    @classmethod
    def of_hybrid(cls, own: Drafting, passes: int = 1) -> "TreeRule":
        """An edge costs the log of the chain's assumed acceptance."""
        edge = math.log(own.chain_acceptance)
        return cls(edge, own.largest_tree, own.candidates_per_row, own.slm_temperature, own.second_pass_nodes, passes)

    @classmethod
    def of_specedge(cls, drafting: Drafting) -> "TreeRule":
        """Of the tree that the SLM grows alone: ln 0.9 an edge, 16 children a row and 4 passes in the paper."""
        own = drafting.specedge
        return cls(
            math.log(own.edge_factor),
            drafting.largest_tree,
            own.children_per_row,
            drafting.slm_temperature,
            passes=own.passes,
            counts_ahead=own.passes_ahead == "counted",
        )

    @property
    def edges(self) -> Edges:
        return Edges(self.edge_log_prob, self.candidates_per_row, self.temperature)


class SlmState:
    """Keeps the SLM's rings at the committed ids and forwards nodes of a tree on top of them.

    A pass has up to `slm.rows` rows: the tokens between the rings' end and the tree (catch-up, such as an accepted SLM
    leaf, then the root), and the nodes with their ancestors: static graphs see the rings and the rows of their own
    pass, so ancestors are fed again in every pass. The root is committed right after its first pass, which leaves all
    rows of further ones to nodes.

    Args:
        slm: the SLM with its rings.
        keep_ids: [C] verifier ids of the columns of its log-probabilities.
        stop_ids: tokens after which nothing is drafted.
    """

    def __init__(self, slm: SlmDevice, keep_ids: np.ndarray, stop_ids: Collection[int]) -> None:
        self._slm = slm
        self.keep_ids = keep_ids
        self.stop_ids = frozenset(stop_ids)

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
        closure = sorted(_with_ancestors(tree.parents, nodes))
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


class TreeBuilder:
    """A tree under one root.

    Args:
        slm: the SLM and its rings.
        base: tokens from the rings' end to the root, the root last.
        planted: nodes that others drafted.
    """

    def __init__(self, slm: SlmState, base: Sequence[int], planted: Tree = EMPTY_TREE) -> None:
        self.tree = planted
        self.base = tuple(base)
        self.base_rows: range = range(0)  # numbers of the base's rows, once they were forwarded
        self.slm_ms = 0.0  # of all passes
        self._slm = slm
        self._rows: dict[int, int] = {}  # forwarded node -> number of its row
        self._after: dict[int, np.ndarray] = {}  # forwarded node -> log q [C]

    def unexpanded(self) -> tuple[int, ...]:
        """Nodes that may get children and have not been forwarded: the root, then the best first."""
        if ROOT not in self._rows:
            return (ROOT, *range(len(self.tree.tokens)))
        nodes = [
            node
            for node, token in enumerate(self.tree.tokens)
            if node not in self._rows and token not in self._slm.stop_ids
        ]
        return tuple(sorted(nodes, key=lambda node: (-self.tree.log_probs[node], node)))

    def fitting(self, nodes: Sequence[int]) -> tuple[int, ...]:
        """Those of `nodes`, first ones first, that fit into one pass with the base and their ancestors."""
        used: set[int] = set()
        chosen = []
        room = self._slm.rows - len(self.base)
        for node in nodes:
            wider = used | _with_ancestors(self.tree.parents, (node,))
            if len(wider) <= room:
                used = wider
                chosen.append(node)
        return tuple(chosen)

    def expand(self, nodes: Sequence[int], edges: Edges) -> None:
        """One pass: forward `nodes` and append their best children."""
        log_probs = tempered(self.forward(nodes), edges.temperature)
        self.tree = add_candidates(
            self.tree, nodes, log_probs, self._slm.keep_ids, edges.edge_log_prob, edges.per_row, self._slm.stop_ids
        )

    def forward(self, nodes: Sequence[int]) -> np.ndarray:
        """One pass without new children: log q [len(nodes), C]."""
        if ROOT in nodes and not self.base:
            raise RuntimeError("the root is in the rings already: its own pass is over")
        started = time.perf_counter()
        log_probs, base_rows, rows = self._slm.forward(self.base, self.tree, nodes)
        self.slm_ms += (time.perf_counter() - started) * MS_PER_S
        if not self.base_rows:
            self.base_rows = base_rows
        self._rows |= dict(zip(nodes, rows, strict=True))
        self._after |= dict(zip(nodes, log_probs, strict=True))
        return log_probs

    def settle_base(self) -> None:
        """The base is committed text: keep its rows, so that further passes need not feed it."""
        self._slm.commit(self.base_rows)
        self.base = ()

    def trim(self, budget: int, best_first: Sequence[int] | np.ndarray | None = None) -> None:
        """Keep the `budget` best nodes, by their own scores or in another order."""
        self.tree, kept = trim(self.tree, budget, best_first)
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
        self._slm.commit(rows)

    def best_guess(self) -> tuple[int, int] | None:
        """The leaf and the token after it with the best score, of the leaves that were forwarded; stops left out."""
        inner = set(self.tree.parents)
        guesses = []
        for node, log_probs in self._after.items():
            if node != ROOT and node not in inner and self.tree.tokens[node] not in self._slm.stop_ids:
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
        for column in best_columns(log_probs, len(self._slm.stop_ids) + 1):
            if int(self._slm.keep_ids[column]) not in self._slm.stop_ids:
                return int(self._slm.keep_ids[column]), float(log_probs[column])
        raise ValueError("the keep set holds nothing but stop tokens")


def _with_ancestors(parents: Sequence[int], nodes: Iterable[int]) -> set[int]:
    """`nodes` and all rows above them, ROOT left out."""
    found: set[int] = set()
    for node in nodes:
        while node != ROOT and node not in found:
            found.add(node)
            node = parents[node]
    return found


def tempered(log_probs: np.ndarray, temperature: float) -> np.ndarray:
    """log q [n, C] at another temperature."""
    if temperature == 1.0:
        return log_probs
    return log_softmax_rows(log_probs.copy(), 1.0 / temperature)
