"""The verifier's sampling distribution p~ and its draws where the logits are: one transfer to the host for a pass.

The numpy code of `protocol.sampling` says what is right, and the tests hold this module against it: in float32 on a CPU
p~ has the same bits and every draw is the same; on another device a draw may differ where its exp rounds differently.
The uniform numbers come from the host, keyed by (seed, position, row), so that device, batch and padding change none.

No [R, V] array is sorted or copied. Columns are dealt into groups, and a row's k best stand in the k groups with the
largest maxima: one pass over the logits finds these groups, everything else works on their columns. The soft-cap
never decreases, so that it may follow the choice; since it can make unequal logits equal, a query with a row whose
groups might not hold every token tied with the k-th is answered again from all columns, as one that cuts nothing is.

Legend: R rows of the pass, A rows that are asked about, V vocabulary, M columns that are looked at, S columns of p~,
N nodes of all queries.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from hyco_export.protocol.acceptance import NO_VALUES, PROBS, RAW, Judged, Query
from hyco_export.protocol.sampling import ALL, GREEDY, greedy_distribution, not_finite, uniforms

GROUP_SIZE = 32  # columns: 8,192 groups of 262,144 columns are ranked, and the columns of 128 looked at
SPARE_GROUPS = 64  # beyond k, and
SPARE_COLUMNS = 64  # beyond k of S: room for tokens tied with the k-th, many in bfloat16; else all columns are read
LOWEST = -200.0  # whose exponential is 0 in float32; of an id that is never generated, in place of -inf
UNCUT_ROWS = 8  # at a time, of the distribution before the cuts: bounds its temporary arrays at 8 x V


@dataclass(frozen=True)
class PassLogits:
    """Rows [start, stop) of a pass: `values` [R, V] before the soft-cap `cap`, -inf for ids never generated."""

    values: torch.Tensor
    cap: float | None
    start: int
    stop: int

    def __getitem__(self, rows: slice) -> "PassLogits":
        """Some of the rows, of which nothing is copied."""
        start, stop, _ = rows.indices(self.stop - self.start)
        return PassLogits(self.values, self.cap, self.start + start, self.start + stop)

    def numpy(self) -> np.ndarray:
        """[stop - start, V] float32 after the soft-cap, on the host."""
        found: np.ndarray = _soft_capped(self.values[self.start : self.stop], self.cap).float().cpu().numpy()
        return found


def look(queries: Sequence[Query]) -> list[Judged | ValueError]:
    """The answers to queries about the rows of one pass; an error for one whose logits are not finite."""
    answers: dict[int, Judged | ValueError] = {}
    by_groups = {place: query for place, query in enumerate(queries) if _cuts_enough(query)}
    if by_groups:
        found = _look(list(by_groups.values()), whole=False)
        answers = {place: one for place, one in zip(by_groups, found, strict=True) if one is not None}
    for place, query in enumerate(queries):
        if place not in answers:
            (one,) = _look([query], whole=True)
            assert one is not None
            answers[place] = one
    return [answers[place] for place in range(len(queries))]


class _Rows(NamedTuple):
    """Of the A rows that are asked about, [A] each: row of the pass, temperature (1 where greedy), k (0 cuts nothing),
    mass that top-p removes at most (negative: none), uniform number, greedy (the smallest of the best ids)."""

    at: torch.Tensor
    temperatures: torch.Tensor
    kept: torch.Tensor
    removed: torch.Tensor
    numbers: torch.Tensor
    greedy: torch.Tensor

    @classmethod
    def of(cls, queries: Sequence[Query]) -> "_Rows":
        """In one copy to the device."""
        columns = []
        for query in queries:
            settings, count = query.sampling, query.rows
            greedy = settings.temperature == GREEDY
            top_k = 1 if greedy else settings.top_k * (settings.top_k < query.logits.values.shape[1])
            numbers = np.zeros(count) if greedy else uniforms(query.seed, query.positions)
            removed = -1.0 if greedy or settings.top_p >= 1.0 else float(np.float32(1 - settings.top_p))
            same = np.repeat([[1.0 if greedy else settings.temperature], [top_k], [removed], [greedy]], count, axis=1)
            columns.append(np.vstack([np.arange(count) + query.logits.start, numbers, same]))
        moved = torch.from_numpy(np.hstack(columns)).to(queries[0].logits.values.device)
        at, numbers_, temperatures, kept, removed_, greedy_ = moved
        return cls(at.long(), temperatures.float(), kept.long(), removed_.float(), numbers_, greedy_.bool())


class _Columns(NamedTuple):
    """Columns that are looked at: ids [A, M] ascending and scores [A, M] float32 after soft-cap and temperature; no
    other column of a row has a score above its bound [A]."""

    ids: torch.Tensor
    scores: torch.Tensor
    bound: torch.Tensor


@torch.inference_mode()
def _look(queries: Sequence[Query], whole: bool) -> list[Judged | ValueError | None]:
    """None for a query that has to be answered from the `whole` of its columns."""
    logits: PassLogits = queries[0].logits
    rows = _Rows.of(queries)
    largest_k = max(_top_k(query) for query in queries)
    columns = _all_columns(logits, rows) if whole else _best_columns(logits, rows, largest_k + SPARE_GROUPS)
    finite = torch.isfinite(columns.scores.amax(dim=1))
    ids, scores, complete = _cut_top_k(columns, rows, largest_k, whole)
    probs = _softmax(_cut_top_p(scores, rows.removed))
    draws = _invert(ids, probs, rows.numbers)
    tokens, parents = _edges(queries, ids.device)
    node_probs = torch.where(ids[parents] == tokens[:, None], probs[parents], 0.0).amax(dim=1)
    uncut = [_uncut(query) for query in queries if _reads_uncut(query)]
    parts = [draws, finite, complete, node_probs, *(values for pair in uncut for values in pair)]
    moved = torch.cat([part.double() for part in parts]).cpu().numpy()  # ids are below 2^53
    on_host = iter(np.split(moved, np.cumsum([len(part) for part in parts])[:-1]))
    return _answers(queries, next(on_host), next(on_host), next(on_host), next(on_host), list(on_host))


def _answers(
    queries: Sequence[Query],
    draws: np.ndarray,
    finite: np.ndarray,
    complete: np.ndarray,
    node_probs: np.ndarray,
    uncut: list[np.ndarray],
) -> list[Judged | ValueError | None]:
    answers: list[Judged | ValueError | None] = []
    row = node = 0
    for query in queries:
        rows, nodes = slice(row, row + query.rows), slice(node, node + len(query.tokens))
        row, node = rows.stop, nodes.stop
        raw, entropies = (uncut.pop(0), uncut.pop(0)) if _reads_uncut(query) else (NO_VALUES, NO_VALUES)
        if not finite[rows].all():
            answers.append(not_finite(np.flatnonzero(finite[rows] == 0)))
        elif not complete[rows].all():
            answers.append(None)
        else:
            drawn = draws[rows].astype(np.int64)
            if RAW in query.reads and query.sampling.temperature == GREEDY:
                raw, entropies = greedy_distribution(drawn, query.tokens, query.parents)
            probs = node_probs[nodes].astype(np.float32) if PROBS in query.reads else NO_VALUES
            answers.append(
                Judged(tuple(query.tokens), tuple(query.parents), tuple(drawn.tolist()), probs, raw, entropies)
            )
    return answers


def _top_k(query: Query) -> int:
    """k, 0 where nothing is cut; 1 where greedy."""
    if query.sampling.temperature == GREEDY:
        return 1
    return query.sampling.top_k if query.sampling.top_k < query.logits.values.shape[1] else ALL


def _cuts_enough(query: Query) -> bool:
    """Whether looking at groups pays."""
    count = _top_k(query)
    return count != ALL and 2 * (count + SPARE_GROUPS) * GROUP_SIZE <= query.logits.values.shape[1]


def _reads_uncut(query: Query) -> bool:
    return RAW in query.reads and query.sampling.temperature != GREEDY


def _edges(queries: Sequence[Query], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """tokens [N] of all nodes, and the place of each one's parent among the A rows."""
    starts = np.cumsum([0, *(query.rows for query in queries)])
    tokens = np.concatenate([np.asarray(query.tokens, np.int64) for query in queries])
    parents = [np.asarray(query.parents, np.int64) + 1 + start for query, start in zip(queries, starts, strict=False)]
    moved = torch.from_numpy(np.stack([tokens, np.concatenate(parents)])).to(device)
    return moved[0], moved[1]


def _soft_capped(logits: torch.Tensor, cap: float | None) -> torch.Tensor:
    """cap * tanh(logits / cap) in the logits' precision, as transformers computes it; -inf stays."""
    if cap is None:
        return logits
    return (logits / cap).tanh_().mul_(cap).masked_fill_(logits == -torch.inf, -torch.inf)


def _scores(logits: torch.Tensor, cap: float | None, temperatures: torch.Tensor) -> torch.Tensor:
    """[A, n] float32 after soft-cap and temperature [A]."""
    return _soft_capped(logits, cap).float() / temperatures[:, None]


def _all_columns(logits: PassLogits, rows: _Rows) -> _Columns:
    scores = _scores(logits.values[rows.at], logits.cap, rows.temperatures)
    ids = torch.arange(scores.shape[1], device=scores.device).expand_as(scores)
    return _Columns(ids, scores, scores.new_full((len(scores),), -torch.inf))


def _best_columns(logits: PassLogits, rows: _Rows, count: int) -> _Columns:
    """The columns of the `count` groups with the largest maxima, and those that are in no group."""
    vocab_size = logits.values.shape[1]
    groups = vocab_size // GROUP_SIZE
    grouped = logits.values[:, : groups * GROUP_SIZE].view(-1, GROUP_SIZE, groups)  # group g: ids g, g + groups, ...
    maxima = grouped.amax(dim=1)[rows.at]  # [A, groups]; NaN propagates
    largest, chosen = maxima.float().topk(count, dim=1)
    chosen = chosen.sort(dim=1).values  # so that ids ascend
    index = chosen[:, None].expand(-1, GROUP_SIZE, -1)
    found = grouped[rows.at].gather(2, index) if len(rows.at) < len(grouped) else grouped.gather(2, index)
    ids = chosen[:, None] + groups * torch.arange(GROUP_SIZE, device=chosen.device)[:, None]
    rest = logits.values[rows.at, groups * GROUP_SIZE :]
    rest_ids = torch.arange(groups * GROUP_SIZE, vocab_size, device=chosen.device).expand(len(rest), -1)
    return _Columns(
        torch.cat([ids.flatten(1), rest_ids], dim=1),
        _scores(torch.cat([found.flatten(1), rest], dim=1), logits.cap, rows.temperatures),
        _scores(largest[:, -1:].to(found.dtype), logits.cap, rows.temperatures)[:, 0],
    )


def _cut_top_k(
    columns: _Columns, rows: _Rows, largest_k: int, whole: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """ids [A, S] ascending, their scores (-inf behind the last one, and for what was cut), and whether that is all of
    a row's top-k, tokens tied with the k-th included; greedy rows keep the smallest of the best ids."""
    if largest_k == ALL:
        return columns.ids, columns.scores, torch.ones_like(rows.greedy)
    best = columns.scores.topk(largest_k, dim=1).values
    threshold = best.gather(1, (rows.kept - 1).clamp(min=0)[:, None])[:, 0]
    threshold = torch.where(rows.kept == ALL, -torch.inf, threshold)
    kept = columns.scores >= threshold[:, None]
    rank = kept.cumsum(dim=1)  # from 1
    kept &= ~rows.greedy[:, None] | (rank == 1)
    width = int(rank[:, -1].max()) if whole else largest_k + SPARE_COLUMNS
    if width > len(columns.ids[0]) // 2:  # rows that cut nothing
        return columns.ids, columns.scores.masked_fill(~kept, -torch.inf), torch.ones_like(rows.greedy)
    place = torch.where(kept & (rank <= width), rank - 1, width)
    shape = (len(place), width + 1)  # what is cut goes to the last place, which is dropped
    ids = columns.ids.new_zeros(shape).scatter_(1, place, columns.ids)[:, :width]
    scores = columns.scores.new_full(shape, -torch.inf).scatter_(1, place, columns.scores)[:, :width]
    complete = (columns.bound < threshold) & (rank[:, -1] <= width)
    return ids, scores, complete


def _cut_top_p(scores: torch.Tensor, removed: torch.Tensor) -> torch.Tensor:
    """scores [A, S] with the least likely tail of mass <= removed [A] set to -inf; at least one token stays."""
    ascending, order = scores.sort(dim=1, stable=True)  # of equal scores the larger id is kept longer
    mass = _softmax(ascending).double().cumsum(dim=1).float()
    cut = mass <= removed[:, None]
    cut[:, -1] = False
    return scores.masked_fill(torch.zeros_like(cut).scatter_(1, order, cut), -torch.inf)


def _softmax(scores: torch.Tensor) -> torch.Tensor:
    """[A, S] float32; differences in float32, sums in float64."""
    exponentials = (scores - scores.amax(dim=1, keepdim=True)).double().exp_()
    return (exponentials / exponentials.sum(dim=1, keepdim=True)).float()


def _invert(ids: torch.Tensor, probs: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """Tokens [A]: the first one whose cumulative probability exceeds numbers [A], in ascending order of ids."""
    cumulative = probs.double().cumsum(dim=1)
    columns = (cumulative <= (numbers * cumulative[:, -1])[:, None]).sum(dim=1)
    places = torch.arange(probs.shape[1], device=probs.device)
    last = torch.where(probs > 0, places, 0).amax(dim=1)  # rounding must not draw a token without mass
    return ids.gather(1, torch.minimum(columns, last)[:, None])[:, 0]


def _uncut(query: Query) -> tuple[torch.Tensor, torch.Tensor]:
    """Of p = softmax(logits / T), nothing cut: p(token | parent) [N] of the query's nodes and H(p) [N + 1] in nats.

    Sums over the vocabulary are in float32, in pairs: within 1e-6 of those in float64.
    """
    logits: PassLogits = query.logits
    values = logits.values[logits.start : logits.start + query.rows]
    peaks, totals, entropies = [], [], []
    for start in range(0, query.rows, UNCUT_ROWS):
        scores = _soft_capped(values[start : start + UNCUT_ROWS], logits.cap).float()
        peak = scores.amax(dim=1, keepdim=True)
        shifted = (scores - peak).div_(query.sampling.temperature).clamp_(min=LOWEST)
        exponentials = shifted.exp()
        total = exponentials.sum(dim=1).double()
        peaks.append(peak[:, 0])
        totals.append(total)
        entropies.append(total.log() - shifted.mul_(exponentials).sum(dim=1) / total)
    tokens, parents = _edges([query], values.device)
    scores = _soft_capped(values[parents, tokens], logits.cap).double() - torch.cat(peaks)[parents].double()
    return (scores / query.sampling.temperature).exp() / torch.cat(totals)[parents], torch.cat(entropies)
