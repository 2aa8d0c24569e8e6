"""HyCo's hybrid tree: planting, scoring and trimming (HyCo, §3.1). Pure numpy; knows no models and no devices.

Legend: N nodes, P planted nodes, R expanded rows, C kept tokens. Scores are natural logarithms in float64. Row order of
every tree made here: planted nodes (chain by depth, then runner-ups by depth), then candidates by (place of the parent
among the expanded rows, rank). Ties between equal scores are broken by depth, then by this order.
"""

from collections.abc import Collection, Sequence

import numpy as np

from hyco_export.runtime.tree import ROOT, Source, Tree, depths

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

    Sorts only the columns that can be among them: C is 86,089 in the paper.
    """
    if count >= len(values):
        return np.argsort(-values, kind="stable")
    last = np.partition(values, len(values) - count)[len(values) - count]
    columns = np.flatnonzero(values >= last)  # all ties with the last one, in column order
    return columns[np.argsort(-values[columns], kind="stable")][:count]


def trim(tree: Tree, budget: int) -> tuple[Tree, tuple[int, ...]]:
    """The `budget` best nodes and their rows in `tree`, in the order of `tree`.

    Every edge costs at least |L|, so the best nodes are closed under ancestors by themselves: asserted, not repaired.
    Ties: smaller depth, then the order of `tree` (planted before candidates, then row, then rank).
    """
    if len(tree) <= budget:
        return tree, tuple(range(len(tree)))
    node_depths = depths(tree.parents)
    order = np.lexsort((np.arange(len(tree)), node_depths, -np.asarray(tree.log_probs)))
    kept = tuple(sorted(int(row) for row in order[:budget]))
    new_row = {ROOT: ROOT, **{row: place for place, row in enumerate(kept)}}
    assert all(tree.parents[row] in new_row for row in kept), "a kept node lost its parent: an edge costs nothing"
    trimmed = Tree(
        tuple(tree.tokens[row] for row in kept),
        tuple(new_row[tree.parents[row]] for row in kept),
        tuple(tree.log_probs[row] for row in kept),
        tuple(tree.sources[row] for row in kept),
    )
    return trimmed, kept
