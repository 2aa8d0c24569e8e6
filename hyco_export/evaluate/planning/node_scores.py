"""Would scores calibrated from traces choose better nodes than one assumed acceptance for every edge (HyCo, §3.1)?

Offline, on logged trees that are larger than the budget: each scoring keeps its best `budget` nodes of a tree, and the
recorded rule judges what is left, with the recorded p~ and draws. The calibrated score of a node is the log of the
product, along its path, of each edge's estimated acceptance: a logistic regression over depth, source, rank and the
SLM's log q, fitted on half of the prompts and tested on the other half, both ways round.

Legend: N nodes of a tree, F features of an edge.
"""

from collections.abc import Sequence

import msgspec
import numpy as np

from hyco_export.errors import HycoError
from hyco_export.evaluate.quality.statistics import draw_counts, interval_ends
from hyco_export.protocol.acceptance import EPSILON, RULES, Judged, decide
from hyco_export.protocol.trace import GenerationTrace, RoundTrace
from hyco_export.protocol.tree import ROOT, Source, Tree, depths

FOLDS = 2
DEEPEST = 8  # depths with a feature of their own; what is deeper shares the last
RIDGE, NEWTON_STEPS = 1e-2, 30
RECORD = "record larger trees: a sweep with `drafting.budget: [64]`"


class Comparison(msgspec.Struct, frozen=True):
    """MAT of the same rounds with the best `budget` nodes by either scoring, and with the whole logged trees."""

    system: str
    rule: str
    budget: int
    prompts: int
    rounds: int
    mat: float  # the recipe's scoring
    calibrated_mat: float
    whole_mat: float  # the most that any choice from the logged trees can reach under the exact rule
    gain: float  # calibrated / recipe's - 1, with its interval over prompts
    low: float
    high: float


class LoggedTree(msgspec.Struct, frozen=True):
    """One round: its prompt's number, its tree, what it was judged by, and the features [N, F] of its edges."""

    prompt: int
    tree: Tree
    judged: Judged
    features: np.ndarray


def compare(traces: Sequence[GenerationTrace], budget: int) -> Comparison:
    """Both scorings over one system's traces.

    Raises:
        HycoError: traces without p~, of a rule that has no edge probabilities, of fewer than two prompts, or with trees
            no larger than the budget.
    """
    rounds = logged_trees(traces)
    if not any(len(one.tree) > budget for one in rounds):
        raise HycoError(f"no logged tree has more than {budget} nodes: there is nothing to choose", RECORD)
    taken = [edge_acceptance(one.judged, traces[0]) for one in rounds]
    weights = [
        fit([(one, share) for one, share in zip(rounds, taken, strict=True) if one.prompt % FOLDS != fold])
        for fold in range(FOLDS)
    ]
    counts = np.zeros((max(one.prompt for one in rounds) + 1, 4))  # of a prompt: rounds, tokens by each choice
    for one in rounds:
        calibrated = path_scores(one.tree, log_acceptance(one.features, weights[one.prompt % FOLDS]))
        choices = (best(one.tree, np.array(one.tree.log_probs), budget), best(one.tree, calibrated, budget))
        whole = np.ones(len(one.tree), dtype=bool)
        tokens = [committed(one.judged, kept, traces[0]) for kept in (*choices, whole)]
        counts[one.prompt] += (1, *tokens)
    counts = counts[counts[:, 0] > 0]
    mat, calibrated_mat, whole_mat = counts[:, 1:].sum(axis=0) / counts[:, 0].sum()
    low, high = _interval(counts[:, 1], counts[:, 2])
    return Comparison(
        system=traces[0].system,
        rule=traces[0].acceptance.rule,
        budget=budget,
        prompts=len(counts),
        rounds=len(rounds),
        mat=float(mat),
        calibrated_mat=float(calibrated_mat),
        whole_mat=float(whole_mat),
        gain=float(calibrated_mat / mat - 1),
        low=low,
        high=high,
    )


def logged_trees(traces: Sequence[GenerationTrace]) -> list[LoggedTree]:
    """All rounds that sent a tree; prompts are numbered in their order.

    Raises:
        HycoError: a round without p~, or fewer than two prompts.
    """
    numbers = {prompt: number for number, prompt in enumerate(dict.fromkeys(one.prompt_id for one in traces))}
    if len(numbers) < FOLDS:
        raise HycoError("scores are fitted on some prompts and tested on others, here is one", "record more prompts")
    found = []
    for trace in traces:
        for record in trace.rounds:
            if record.evidence is None:
                raise HycoError(f"round {record.round} of {trace.prompt_id} was logged without p~", RECORD)
            if len(record.tree):
                judged = Judged.of(record.evidence)
                found.append(LoggedTree(numbers[trace.prompt_id], record.tree, judged, features(record)))
    return found


def edge_acceptance(judged: Judged, trace: GenerationTrace) -> np.ndarray:
    """[N]: probability that the rule takes a node once it stands at its parent, over the verifier's draw there.

    Raises:
        HycoError: a rule other than exact and epsilon.
    """
    probs = judged.probs.astype(np.float64)
    rule = trace.acceptance.rule
    if rule not in ("exact", "epsilon"):
        raise HycoError(f"the traces were judged by {rule}", "record hyco-exact or hyco")
    if EPSILON in RULES[rule].options:
        return np.where(judged.probs >= np.float32(trace.acceptance.epsilon), 1.0, probs)
    return probs


def features(record: RoundTrace) -> np.ndarray:
    """[N, F] of a tree's edges: planted nodes by source and depth; of the SLM's the depth, log q, rank, parent's source
    and whether the chain goes on beside it."""
    tree = record.tree
    depth = np.minimum(depths(tree.parents), DEEPEST)
    source, parents = np.array(tree.sources), np.array(tree.parents)
    log_q = slm_log_q(tree)
    rank = _ranks(parents, source, log_q)
    slm = source == Source.SLM
    above = np.where(parents == ROOT, -1, source[parents])
    beside_chain = slm & np.isin(parents, parents[source == Source.CHAIN])
    by_depth = depth[:, None] == np.arange(1, DEEPEST + 1)
    groups = [
        *(by_depth & (source == kind)[:, None] for kind in Source),
        slm[:, None] * np.stack([log_q, log_q**2, np.log1p(rank), rank == 0], axis=1),
        *((slm & (above == kind))[:, None] * np.stack([np.ones_like(log_q), log_q], axis=1) for kind in (-1, 0, 1)),
        beside_chain[:, None] * np.stack([np.ones_like(log_q), log_q], axis=1),
    ]
    return np.concatenate([group.astype(np.float64) for group in groups], axis=1)


def slm_log_q(tree: Tree) -> np.ndarray:
    """[N] of the SLM's nodes, from their scores: score(v) + L + log q; 0 for planted ones.

    L is the score of the chain's first node.

    Raises:
        HycoError: a tree without a chain.
    """
    scores, parents = np.array(tree.log_probs), np.array(tree.parents)
    first = next((row for row, kind in enumerate(tree.sources) if kind == Source.CHAIN), None)
    if first is None:
        raise HycoError("a tree without a chain: its scores do not tell log q", "record hyco-exact or hyco")
    above = np.where(parents == ROOT, 0.0, scores[parents])
    return np.where(np.array(tree.sources) == Source.SLM, scores - above - scores[first], 0.0)


def _ranks(parents: np.ndarray, source: np.ndarray, log_q: np.ndarray) -> np.ndarray:
    """[N] of a node among its parent's SLM children, best first."""
    rank = np.zeros(len(parents), dtype=np.int64)
    for parent in np.unique(parents):
        rows = np.flatnonzero((parents == parent) & (source == Source.SLM))
        rank[rows[np.argsort(-log_q[rows], kind="stable")]] = np.arange(len(rows))
    return rank


def fit(rounds: Sequence[tuple[LoggedTree, np.ndarray]]) -> np.ndarray:
    """Logistic regression [F] of edges' acceptance [N]; an edge weighs as its parent is likely to be reached."""
    reached = []
    for one, share in rounds:
        path = np.ones(len(share))
        for row, parent in enumerate(one.tree.parents):
            path[row] = path[parent] * share[parent] if parent != ROOT else 1.0
        reached.append(path)
    x = np.concatenate([one.features for one, _ in rounds])
    y, weight = np.concatenate([share for _, share in rounds]), np.concatenate(reached)
    found = np.zeros(x.shape[1])
    for _ in range(NEWTON_STEPS):
        chance = np.exp(log_acceptance(x, found))
        curvature = (x * (weight * chance * (1.0 - chance))[:, None]).T @ x + RIDGE * np.eye(len(found))
        found = found + np.linalg.solve(curvature, x.T @ (weight * (y - chance)) - RIDGE * found)
    return found


def log_acceptance(x: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """[N] log of the estimated acceptance of edges with features x [N, F]."""
    scores: np.ndarray = -np.logaddexp(0.0, -(x @ weights))
    return scores


def path_scores(tree: Tree, edges: np.ndarray) -> np.ndarray:
    """[N] sums of edges [N] along each node's path."""
    scores = np.array(edges)
    for row, parent in enumerate(tree.parents):
        scores[row] += scores[parent] if parent != ROOT else 0.0
    return scores


def best(tree: Tree, scores: np.ndarray, budget: int) -> np.ndarray:
    """bool [N]: the best nodes; no edge adds to a score, so that they are closed under ancestors. Ties as on the
    device: the smaller depth, then the earlier row."""
    order = np.lexsort((np.arange(len(tree)), depths(tree.parents), -scores))
    kept = np.zeros(len(tree), dtype=bool)
    kept[order[:budget]] = True
    return kept


def committed(judged: Judged, kept: np.ndarray, trace: GenerationTrace) -> int:
    """Tokens that the round would commit with the kept nodes [N] alone, its bonus counted and nothing cut."""
    rows = np.flatnonzero(kept).tolist()
    place = {ROOT: ROOT} | {row: number for number, row in enumerate(rows)}
    at = [0, *(row + 1 for row in rows)]
    smaller = Judged(
        tokens=[judged.tokens[row] for row in rows],
        parents=[place[judged.parents[row]] for row in rows],
        draws=[judged.draws[row] for row in at],
        probs=judged.probs[rows],
        raw_probs=judged.raw_probs[rows],
        entropies=judged.entropies[at],
    )
    return len(decide(smaller, trace.acceptance, frozenset(trace.stop_ids)).accepted) + 1


def _interval(mine: np.ndarray, calibrated: np.ndarray) -> tuple[float, float]:
    """Percentiles of the gain when prompts are drawn again; both scorings keep the same rounds, which cancel."""
    drawn = draw_counts(len(mine))
    low, high = interval_ends(drawn @ calibrated / (drawn @ mine) - 1)
    return float(low), float(high)
