"""What a right verifier says of a tree: probabilities by transformers' own forward, soft-cap and logits warpers.

A truth that shares nothing with the server: no cache, no tree attention, no sampler of ours. The tree's path is the
captured answer itself, so that one causal pass sees what every row of the tree sees; its other nodes are tokens of
several ranks, some inside every cut and some outside.

Legend: T tokens of a text, R = DEPTH + 1 rows (root first), V vocabulary, N nodes.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from transformers import (
    LogitsProcessorList,
    PreTrainedModel,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from hyco_export.core.golden import LIKELY_ROOT, GoldenDistribution, GoldenTree
from hyco_export.core.recipe import Sampling
from hyco_export.nn.generation_rules import suppressed_ids

DEPTH = 5  # nodes of the path below the root
PLACES = 16  # of an answer's beginning, one of which becomes the root
RANKS = (0, 1, 2, 3, 5, 9, 15, 40, 79)  # of a row's children, with the text's token at most 10: 60 nodes of a tree's 64
FIXED_SAMPLINGS = (  # beside the recipe's: nothing cut, a tight top-k in the cold, a tight top-p in the heat
    Sampling(temperature=1.0, top_k=0, top_p=1.0),
    Sampling(temperature=0.6, top_k=4, top_p=1.0),
    Sampling(temperature=1.5, top_k=0, top_p=0.7),
)
FAR = 99.0  # nats: of a node that no cut can reach


def samplings(chosen: Sampling) -> tuple[Sampling, ...]:
    """Those compared: the recipe's where it samples, and fixed ones."""
    return tuple(dict.fromkeys((*FIXED_SAMPLINGS, *([chosen] if chosen.temperature else []))))


@torch.no_grad()
def golden_tree(model: PreTrainedModel, ids: Sequence[int], answer_start: int, chosen: Sampling) -> GoldenTree | None:
    """The tree behind a root that sampling is likely to draw; None where the answer is too short.

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
    children, parents = _nodes(logits[here], ids[root + 1 : root + 1 + DEPTH])
    at = torch.tensor([sorted(set(parents)).index(parent) for parent in parents]), torch.tensor(children)
    return GoldenTree(
        prompt=tuple(ids[:root]),
        root=int(ids[root]),
        tokens=tuple(children),
        parents=tuple(parents),
        soft_cap=config.final_logit_softcapping,
        logits=tuple(logits[here][at].tolist()),
        plain_logits=tuple(plain[here][at].tolist()),
        distributions=tuple(
            _distribution(logits[here], at, kind, float(each[place])) for kind, each in zip(kinds, found, strict=True)
        ),
    )


def _best_place(root_probs: torch.Tensor, logits: torch.Tensor) -> int:
    """Of the likely roots the one whose rows leave most open: cuts show there. logits [places + R, V]."""
    entropies = torch.distributions.Categorical(logits=logits).entropy()
    open_there = entropies[1:].unfold(0, DEPTH + 1, 1).sum(dim=-1)[: len(root_probs)]
    likely = root_probs >= LIKELY_ROOT
    return int(open_there.masked_fill(~likely, -1.0).argmax() if likely.any() else root_probs.argmax())


def _logits(model: PreTrainedModel, tokens: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Logits float32 [len(rows), V] of these positions of tokens [1, T], as transformers' sampling gets them."""
    forward: Any = model
    logits = forward(tokens, use_cache=False, logits_to_keep=rows).logits[0].float().cpu()
    if ids := suppressed_ids(model):
        logits = SuppressTokensLogitsProcessor(list(ids), device="cpu")(tokens, logits)
    return logits


@contextmanager
def _without_soft_cap(config: Any) -> Iterator[None]:
    """The model's own forward without its last step."""
    cap = config.final_logit_softcapping
    config.final_logit_softcapping = None
    try:
        yield
    finally:
        config.final_logit_softcapping = cap


def _nodes(logits: torch.Tensor, path: Sequence[int]) -> tuple[list[int], list[int]]:
    """Tokens and parents: under each of the R rows its tokens of RANKS, and the path's next one."""
    tokens: list[int] = []
    parents: list[int] = []
    parent = -1
    for row, scores in enumerate(logits):
        order = scores.argsort(descending=True, stable=True)
        usable = int(scores.isfinite().sum())
        children = [int(order[rank]) for rank in RANKS if rank < usable]
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
    logits: torch.Tensor, at: tuple[torch.Tensor, torch.Tensor], kind: Sampling, root_prob: float
) -> GoldenDistribution:
    """logits [R, V]; `at`: row of the parent and token of every node."""
    log_probs = (logits.double() / kind.temperature).log_softmax(dim=-1)
    probs = log_probs.exp()
    entropies = -(probs * log_probs.nan_to_num(neginf=0.0)).sum(dim=-1)
    kept = _warped(logits, kind).softmax(dim=-1)
    return GoldenDistribution(
        temperature=kind.temperature,
        top_k=kind.top_k,
        top_p=kind.top_p,
        log_probs=tuple(log_probs[at].tolist()),
        probs=tuple(kept[at].tolist()),
        edges=tuple(_edges(log_probs, kind)[at].tolist()),
        entropies=tuple(entropies.tolist()),
        root_prob=root_prob,
    )


def _edges(log_probs: torch.Tensor, kind: Sampling) -> torch.Tensor:
    """[R, V]: how far log p is from what decides of the token: the k-th score, or the mass that top-p cuts."""
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
        edges = torch.where(edges < 0, edges, torch.minimum(edges, by_mass))
    return torch.empty_like(edges).scatter(1, order, edges.clamp(-FAR, FAR))
