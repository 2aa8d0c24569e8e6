"""Golden trees: around a likely root of an answer, the probabilities and draws that a right server gives.

Probabilities come from transformers' own forward pass, soft cap and logits warpers; draws from PROTOCOL.md ("The draw")
on those distributions. This is a reference of its own: no part of the server's sampling code is used, which is judged
by it.

Legend: V vocabulary, R rows of a tree.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any, cast

import numpy as np
import torch
from transformers import (
    LogitsProcessorList,
    PreTrainedModel,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from hyco_export.core.golden import LIKELY_ROOT, GoldenDistribution, GoldenDraw, GoldenTree
from hyco_export.core.recipe import Sampling
from hyco_export.models.generation_rules import suppressed_ids

DEPTH = 5  # nodes of the path below the root
PLACES = 16  # positions at the beginning of an answer, one of which becomes the root
RANKS = (0, 1, 2, 9, 24, 5, 15, 40, 79)  # of a row's children, beside those at the cuts, in order of preference
CHILDREN = 9  # of a row, and the text's token: 60 nodes of a tree's 64
FIXED_SAMPLINGS = (  # beside the recipe's: no cut, a small top-k at a low temperature, a small top-p at a high one
    Sampling(temperature=1.0, top_k=0, top_p=1.0),
    Sampling(temperature=0.6, top_k=4, top_p=1.0),
    Sampling(temperature=1.5, top_k=0, top_p=0.7),
)
FAR = 99.0  # nats: the distance where there is no cut


def samplings(chosen: Sampling) -> tuple[Sampling, ...]:
    """The samplings that are compared: fixed ones and, where the recipe samples, its own with and without top-p.

    Its top-p may cut before its top-k does.
    """
    wide = Sampling(chosen.temperature, chosen.top_k, top_p=1.0)
    return tuple(dict.fromkeys((*FIXED_SAMPLINGS, *([wide, chosen] if chosen.temperature else []))))


def child_ranks(kinds: Sequence[Sampling]) -> tuple[int, ...]:
    """Ranks (0: the likeliest) of a row's children: the last one inside and the first one outside of every top-k, then
    RANKS."""
    at_cuts = [rank for kind in kinds if kind.top_k for rank in (kind.top_k - 1, kind.top_k)]
    return tuple(sorted(list(dict.fromkeys([*at_cuts, *RANKS]))[:CHILDREN]))


@torch.no_grad()
def golden_tree(model: PreTrainedModel, ids: Sequence[int], answer_start: int, chosen: Sampling) -> GoldenTree | None:
    """The tree below a root that sampling is likely to draw; None where the answer is too short.

    Args:
        ids: prompt and answer.
        chosen: the recipe's sampling.
    """
    first, end = max(answer_start, 1), min(len(ids) - 1 - DEPTH, answer_start + PLACES)
    if end <= first:
        return None
    config = model.config.get_text_config()
    tokens = torch.tensor([list(ids[: end + DEPTH])], device=model.device)
    rows = torch.arange(first - 1, end + DEPTH, device=model.device)  # row i stands at position first - 1 + i
    logits = _logits(model, tokens, rows)
    with _without_soft_cap(config):
        plain = _logits(model, tokens, rows)
    kinds = samplings(chosen)
    found = [_root_prob(logits, ids[first:end], kind) for kind in kinds]  # [places] each
    place = _best_place(torch.stack(found).amin(dim=0), logits)
    root = first + place
    here = slice(place + 1, place + 2 + DEPTH)  # rows of the tree among those of the pass
    children, parents = _nodes(logits[here], ids[root + 1 : root + 1 + DEPTH], child_ranks(kinds))
    inner = sorted(set(parents))
    at = torch.tensor([inner.index(parent) for parent in parents]), torch.tensor(children)
    tree_rows = [parent + 1 for parent in inner]
    behind = slice(place, place + 2 + DEPTH)  # the row that the root is drawn from, then those of the tree
    return GoldenTree(
        prompt=tuple(ids[:root]),
        root=int(ids[root]),
        tokens=tuple(children),
        parents=tuple(parents),
        soft_cap=config.final_logit_softcapping,
        logits=tuple(logits[here][at].tolist()),
        plain_logits=tuple(plain[here][at].tolist()),
        distributions=tuple(
            _distribution(logits[behind], at, kind, float(each[place]), int(ids[root]), root, tree_rows)
            for kind, each in zip(kinds, found, strict=True)
        ),
    )


def _best_place(root_probs: torch.Tensor, logits: torch.Tensor) -> int:
    """Index of the root, among the likely ones, whose rows have the largest entropy: cuts change most there.

    logits: [places + R, V].
    """
    entropies = torch.distributions.Categorical(logits=logits).entropy()
    tree_entropies = entropies[1:].unfold(0, DEPTH + 1, 1).sum(dim=-1)[: len(root_probs)]
    likely = root_probs >= LIKELY_ROOT
    return int(tree_entropies.masked_fill(~likely, -1.0).argmax() if likely.any() else root_probs.argmax())


def _logits(model: PreTrainedModel, tokens: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Logits float32 [len(rows), V] of these positions of tokens [1, T], as transformers' sampling gets them."""
    forward: Any = model
    logits = forward(tokens, use_cache=False, logits_to_keep=rows).logits[0].float().cpu()
    if ids := suppressed_ids(model):
        logits = SuppressTokensLogitsProcessor(list(ids), device="cpu")(tokens, logits)
    return logits


@contextmanager
def _without_soft_cap(config: Any) -> Iterator[None]:
    """The model's own forward pass without the soft cap, which is its last step."""
    cap = config.final_logit_softcapping
    config.final_logit_softcapping = None
    try:
        yield
    finally:
        config.final_logit_softcapping = cap


def _nodes(logits: torch.Tensor, path: Sequence[int], ranks: Sequence[int]) -> tuple[list[int], list[int]]:
    """Tokens and parents: below each of the R rows the path's next token and the row's tokens of these ranks."""
    tokens: list[int] = []
    parents: list[int] = []
    parent = -1
    for row, scores in enumerate(logits):
        order = scores.argsort(descending=True, stable=True)
        usable = int(scores.isfinite().sum())
        children = [int(order[rank]) for rank in ranks if rank < usable]
        following = path[row : row + 1]
        children = list(dict.fromkeys([*following, *children]))
        first = len(tokens)
        tokens += children
        parents += [parent] * len(children)
        parent = first  # the path's token comes first
    return tokens, parents


def _warped(logits: torch.Tensor, kind: Sampling) -> torch.Tensor:
    """Scores [..., V] after transformers' warpers, in its order."""
    warpers = LogitsProcessorList([TemperatureLogitsWarper(float(kind.temperature))])
    if kind.top_k:
        warpers.append(TopKLogitsWarper(kind.top_k))
    if kind.top_p < 1.0:
        warpers.append(TopPLogitsWarper(kind.top_p))
    return warpers(cast(Any, torch.zeros(len(logits), 1, dtype=torch.long)), cast(Any, logits.clone()))


def _root_prob(logits: torch.Tensor, following: Sequence[int], kind: Sampling) -> torch.Tensor:
    """Probability after the cuts of each of `following` [places] behind the row before it."""
    probs = _warped(logits[: len(following)], kind).softmax(dim=-1)
    return probs.gather(1, torch.tensor(following)[:, None])[:, 0]


def _distribution(
    logits: torch.Tensor,
    at: tuple[torch.Tensor, torch.Tensor],
    kind: Sampling,
    root_prob: float,
    root: int,
    root_position: int,
    rows: Sequence[int],
) -> GoldenDistribution:
    """One sampling's probabilities, entropies and draws.

    Args:
        logits: [1 + R, V], of the row before the root, then of the tree's `rows`.
        at: of each node, the index of its parent among the R rows, and its token.
    """
    log_probs = (logits.double() / kind.temperature).log_softmax(dim=-1)
    warped = _warped(logits, kind)
    edges = cut_distances(log_probs, kind)
    cumulative = [
        CumulativeDistribution(*each)
        for each in zip(log_probs.numpy(), warped.isfinite().numpy(), edges.numpy(), strict=True)
    ]
    log_probs, warped, edges = log_probs[1:], warped[1:], edges[1:]
    entropies = -(log_probs.exp() * log_probs.nan_to_num(neginf=0.0)).sum(dim=-1)
    return GoldenDistribution(
        temperature=kind.temperature,
        top_k=kind.top_k,
        top_p=kind.top_p,
        log_probs=tuple(log_probs[at].tolist()),
        probs=tuple(warped.softmax(dim=-1)[at].tolist()),
        edges=tuple(edges[at].tolist()),
        entropies=tuple(entropies.tolist()),
        root_prob=root_prob,
        draws=golden_draws(root, root_position, rows, cumulative),
    )


def cut_distances(log_probs: torch.Tensor, kind: Sampling) -> torch.Tensor:
    """[R, V]: distance of log p from the cut that decides about the token, negative outside: from the k-th score, or
    from top-p's mass or the last token inside it, whichever is nearer. Where many tokens are about as likely, rounding
    changes their ranks, and with them the mass behind each.
    """
    order = log_probs.argsort(dim=-1, descending=True)
    ranked = log_probs.gather(1, order)
    edges = torch.full_like(ranked, FAR)
    if kind.top_k and kind.top_k < ranked.shape[1]:
        inside, outside = ranked[:, kind.top_k - 1 : kind.top_k], ranked[:, kind.top_k : kind.top_k + 1]
        edges = torch.where(ranked >= inside, ranked - outside, ranked - inside)
    if kind.top_p < 1.0:
        left = ranked.masked_fill(edges < 0, -torch.inf).softmax(dim=-1)
        tail = left.flip(-1).cumsum(dim=-1).flip(-1)  # mass of a token and all behind it
        by_mass = torch.log(tail / (1 - kind.top_p))
        by_mass[:, 0] = FAR  # one token stays
        kept = by_mass > 0
        last = kept.sum(dim=-1, keepdim=True) - 1
        inside = ranked.gather(1, last)
        outside = ranked.gather(1, (last + 1).clamp(max=ranked.shape[1] - 1))
        by_score = torch.where(kept, ranked - outside, inside - ranked)
        by_mass = by_mass.sign() * torch.minimum(by_mass.abs(), by_score)
        edges = torch.where(edges < 0, edges, torch.minimum(edges, by_mass))
    return torch.empty_like(edges).scatter(1, order, edges.clamp(-FAR, FAR))


# ---- draws

SEEDS_STORED = 24  # of a sampling: another way to draw gives a root of probability 1/2 with all of them once in 2^24
SEEDS_TRIED = 2000  # a root of probability 0.01 is drawn by 20 of them
NEAR_CUT = 0.5  # nats: a token this close to a cut may fall on its other side in bfloat16
LOW_BITS = 11  # of 64, dropped: a float64 has 53
MARGIN_DIGITS = 6


class CumulativeDistribution:
    """One row's distribution: [0, 1) divided among the tokens in ascending order of ids.

    Args:
        log_probs: float64 [V], nothing cut.
        kept: bool [V], the tokens that transformers' warpers leave.
        edges: [V], how far log p is from the cut; below 0 outside it.
    """

    def __init__(self, log_probs: np.ndarray, kept: np.ndarray, edges: np.ndarray) -> None:
        self._log_probs, self._kept, self._edges = log_probs, kept, edges

    def draw(self, number: float) -> tuple[int, float]:
        """The token at a number in [0, 1), and the distance from the number to the nearest other token.

        A token close to the cut may fall on its other side in a right server. Then the distance is the least over both
        distributions, and 0 where they draw different tokens.
        """
        found = [_at(ends, number) for ends in self._ends]
        token = found[0][0]
        margin = min(margin if each == token else 0.0 for each, margin in found)
        return token, round(min(margin, 1.0), MARGIN_DIGITS)

    @cached_property
    def _ends(self) -> list[np.ndarray]:
        """Upper ends of the tokens' parts, float64 [V]: by the cut, and by cuts one token wider and narrower."""
        probs = np.exp(self._log_probs)
        sums = [np.cumsum(np.where(kept, probs, 0.0)) for kept in self._cuts()]
        return [each / each[-1] for each in sums]

    def _cuts(self) -> Iterator[np.ndarray]:
        yield self._kept
        last = int(np.where(self._kept, self._log_probs, np.inf).argmin())
        first_out = int(np.where(self._kept, -np.inf, self._log_probs).argmax())
        for token, stays in ((last, self._kept.sum() > 1), (first_out, not self._kept[first_out])):
            if stays and np.isfinite(self._log_probs[token]) and abs(self._edges[token]) < NEAR_CUT:
                other = self._kept.copy()
                other[token] = not other[token]
                yield other


def _at(ends: np.ndarray, number: float) -> tuple[int, float]:
    """The token at a number and the distance to its nearest neighbour; 0 and 1 border on no other token."""
    token = int(np.searchsorted(ends, number, side="right"))
    begin = ends[token - 1] if token else 0.0
    below = number - begin if begin > 0.0 else np.inf
    above = ends[token] - number if ends[token] < ends[-1] else np.inf
    return token, float(min(below, above))


def draw_number(seed: int, position: int, row: int) -> float:
    """The number u of a row: element `row` of the Philox stream with the key (seed, position)."""
    stream = np.random.Philox(key=np.array([seed, position], np.uint64)).random_raw(row + 1)
    return float(int(stream[row]) >> LOW_BITS) * 2.0**-53


def golden_draws(
    root: int, position: int, rows: Sequence[int], distributions: Sequence[CumulativeDistribution]
) -> tuple[GoldenDraw, ...]:
    """Draws of the first seeds that draw the root; fewer, or none, where it is unlikely.

    Args:
        root, position: the tree's root.
        rows: R rows of the tree, one at each depth from 0 on.
        distributions: of the row before the root, then of `rows`.
    """
    found: list[GoldenDraw] = []
    for seed in range(SEEDS_TRIED):
        token, root_margin = distributions[0].draw(draw_number(seed, position - 1, 0))
        if token != root:
            continue
        drawn = [
            distribution.draw(draw_number(seed, position + depth, row))
            for depth, (row, distribution) in enumerate(zip(rows, distributions[1:], strict=True))
        ]
        tokens, margins = zip(*drawn, strict=True)
        found.append(GoldenDraw(seed, root_margin, tokens, margins))
        if len(found) == SEEDS_STORED:
            break
    return tuple(found)
