"""Acceptance rules: which drafted tokens the verifier takes. Pure functions over p~ of the nodes and one draw per row.

Row 0 is the root, row i + 1 node i; draws[r] ~ p~[r]. A rule only says which edges are acceptable; the choice among the
paths it opens is common to all. Knows no logits and no sessions; `rules` is the table of names and options.
"""

import math
from collections.abc import Collection, Sequence

import msgspec
import numpy as np

from hyco_export.runtime.tree import ROOT, path_to


class Verdict(msgspec.Struct, frozen=True):
    """The accepted path and the token after it.

    `accepted` are tree rows from depth 1 down; `drawn[i]` is True where accepted row i equals the verifier's own draw;
    `bonus` is the draw at the path's end.
    """

    accepted: tuple[int, ...]
    drawn: tuple[bool, ...]
    bonus: int


def exact(tokens: Sequence[int], parents: Sequence[int], draws: Sequence[int]) -> Verdict:
    """From the root, while a child equals the draw at the current row, go there.

    Lossless for any tree without duplicate siblings: every committed token is the verifier's own draw at its true
    context. tokens [N], parents [N], draws [N + 1].
    """
    child = {edge: row for row, edge in enumerate(zip(parents, tokens, strict=True))}
    path: list[int] = []
    row = ROOT
    while (following := child.get((row, draws[row + 1]))) is not None:
        path.append(following)
        row = following
    return Verdict(tuple(path), (True,) * len(path), int(draws[row + 1]))


def epsilon(
    tokens: Sequence[int],
    parents: Sequence[int],
    draws: Sequence[int],
    probs: np.ndarray,
    threshold: float,
    draw_only: Collection[int] = (),
) -> Verdict:
    """A child is acceptable at every node if it equals the draw there or p~(child | parent) >= threshold.

    tokens [N], parents [N], draws [N + 1], probs [N] float32 = p~(token | parent). A threshold of 1 gives `exact`.
    Tokens in `draw_only` are acceptable as draws alone.
    """
    matches = _matches(tokens, parents, draws)
    return _commit_best(tokens, parents, draws, matches, _likely(probs, threshold), probs, draw_only)


def epsilon_at_rejections(
    tokens: Sequence[int],
    parents: Sequence[int],
    draws: Sequence[int],
    probs: np.ndarray,
    threshold: float,
    draw_only: Collection[int] = (),
) -> Verdict:
    """`epsilon`, but only below nodes whose draw no child equals; elsewhere that child alone is acceptable.

    A reading of HyCo, §3.5 ("at every node rather than only at rejections"). Arguments as in `epsilon`.
    """
    matches = _matches(tokens, parents, draws)
    settled = {parent for parent, match in zip(parents, matches, strict=True) if match}
    likely = [
        enough and parent not in settled for enough, parent in zip(_likely(probs, threshold), parents, strict=True)
    ]
    return _commit_best(tokens, parents, draws, matches, likely, probs, draw_only)


def typical(
    tokens: Sequence[int],
    parents: Sequence[int],
    draws: Sequence[int],
    probs: np.ndarray,
    raw_probs: np.ndarray,
    entropies: np.ndarray,
    cap: float,
    slope: float,
    draw_only: Collection[int] = (),
) -> Verdict:
    """Medusa's typical acceptance: the draw, or p(child | parent) > min(cap, slope * exp(-H(p))).

    p is the softmax of the logits at the temperature, without top-k and top-p (Cai et al. 2024): raw_probs [N] float64
    = p(token | parent), entropies [N + 1] float64 = H(p) of every row in nats. The path is chosen by p~, as everywhere;
    a token that p~ has cut counts as log p~ = -inf there. Other arguments as in `epsilon`.
    """
    limits = np.minimum(cap, slope * np.exp(-entropies))  # [N + 1]
    likely = (raw_probs > limits[np.asarray(parents, np.int64) + 1]).tolist()
    return _commit_best(tokens, parents, draws, _matches(tokens, parents, draws), likely, probs, draw_only)


def _likely(probs: np.ndarray, threshold: float) -> list[bool]:
    if not 0.0 < threshold <= 1.0:
        raise ValueError(f"epsilon is {threshold}, it must lie in (0, 1]")
    return (probs >= np.float32(threshold)).tolist()  # in float32, the precision of p~


def _matches(tokens: Sequence[int], parents: Sequence[int], draws: Sequence[int]) -> list[bool]:
    """Does node i equal the draw at its parent? [N]"""
    return [token == draws[parent + 1] for token, parent in zip(tokens, parents, strict=True)]


def _commit_best(
    tokens: Sequence[int],
    parents: Sequence[int],
    draws: Sequence[int],
    matches: Sequence[bool],
    likely: Sequence[bool],
    probs: np.ndarray,
    draw_only: Collection[int],
) -> Verdict:
    """The best node reachable through acceptable edges, and the draw there.

    An edge is acceptable if it equals the draw, or is likely and not in `draw_only`. Best: largest depth, then most
    edges that equal the draw, then largest sum of log p~, then smallest row.
    """
    ranks: dict[int, tuple[int, int, float, int]] = {ROOT: (0, 0, 0.0, -ROOT)}
    for row, parent in enumerate(parents):
        acceptable = matches[row] or (likely[row] and tokens[row] not in draw_only)
        if acceptable and parent in ranks:
            depth, drawn, log_prob, _ = ranks[parent]
            ranks[row] = (depth + 1, drawn + matches[row], log_prob + _log(probs[row]), -row)
    end = max(ranks, key=ranks.__getitem__)
    path = path_to(parents, end)
    # a child that equals the draw is acceptable and deeper: it would have been the end
    assert not any(matches[row] for row, parent in enumerate(parents) if parent == end)
    return Verdict(path, tuple(bool(matches[row]) for row in path), int(draws[end + 1]))


def _log(prob: float) -> float:
    return math.log(prob) if prob > 0 else -math.inf
