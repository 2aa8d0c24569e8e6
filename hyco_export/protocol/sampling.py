"""The verifier's sampling distribution p~ and its draws. Pure numpy.

Legend: R rows, V vocabulary, S tokens that survive the cuts (64 for the paper's top-k). p~ = soft-capped logits, then
temperature, top-k, top-p, softmax: the order and the arithmetic of transformers' TemperatureLogitsWarper,
TopKLogitsWarper and TopPLogitsWarper in float32. Scaled scores and surviving tokens are theirs bit for bit, except that
of equal scores at the top-p edge the largest ids stay here, an arbitrary choice there (torch's sort is not stable);
probabilities differ by the last bits of torch's vectorised exp.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hyco_export.protocol.wire import Sampling

GREEDY = 0.0  # temperature that means: the most likely token, always
ALL = 0  # top_k that cuts nothing
GROUPS_PER_KEPT = 8  # then about 1/16 more scores than needed reach the k-th maximum
UNIFORM_BITS = 53  # of a float64 in [0, 1)


@dataclass(frozen=True)
class Support:
    """p~ of R rows without the tokens that were cut.

    ids [R, S] ascending in every row; probs [R, S] float32, 0 where a row has fewer than S tokens.
    """

    ids: np.ndarray
    probs: np.ndarray


def sampling_support(logits: np.ndarray, sampling: Sampling) -> Support:
    """logits [R, V] float32 (after the soft-cap) -> p~ without its zeros.

    Raises:
        ValueError: a row holds NaN or no finite logit.
    """
    peaks = logits.max(axis=1)  # NaN propagates
    if not np.isfinite(peaks).all():
        raise not_finite(np.flatnonzero(~np.isfinite(peaks)))
    if sampling.temperature == GREEDY:
        return Support(logits.argmax(axis=1)[:, None], np.ones((len(logits), 1), np.float32))
    scores = logits / np.float32(sampling.temperature)  # [R, V]
    ids, kept = _top_k(scores, sampling.top_k)
    if sampling.top_p < 1.0:
        kept = _top_p(kept, sampling.top_p)
    return Support(ids, _softmax(kept))


def not_finite(rows: np.ndarray) -> ValueError:
    """What is wrong with these rows."""
    return ValueError(f"rows {rows.tolist()} of the logits are not finite")


def draws(support: Support, seed: int, positions: np.ndarray) -> np.ndarray:
    """One token per row, [R] int64: s[r] ~ p~[r], the same whenever (seed, positions[r], r) is the same."""
    if support.ids.shape[1] == 1:  # greedy: no number changes anything, and they take longer than all the rest
        return support.ids[:, 0].astype(np.int64)
    return invert(support, uniforms(seed, positions))


def uniforms(seed: int, positions: np.ndarray) -> np.ndarray:
    """Numbers [R] in [0, 1): row r's is element r of the Philox stream with key (seed, positions[r]).

    Batching, retries and replays therefore change nothing.
    """
    result = np.empty(len(positions), np.float64)
    for position in set(positions.tolist()):
        stream = np.random.Philox(key=np.array([seed, position], np.uint64)).random_raw(len(positions))
        at = positions == position
        result[at] = (stream[at] >> np.uint64(64 - UNIFORM_BITS)) * 2.0**-UNIFORM_BITS
    return result


def invert(support: Support, numbers: np.ndarray) -> np.ndarray:
    """Tokens [R]: the first one whose cumulative probability exceeds numbers[r], in ascending order of ids."""
    cumulative = np.cumsum(support.probs, axis=1, dtype=np.float64)  # [R, S]
    columns = (cumulative <= (numbers * cumulative[:, -1])[:, None]).sum(axis=1)
    last = support.probs.shape[1] - 1 - np.argmax(support.probs[:, ::-1] > 0, axis=1)  # of the tokens with mass
    tokens: np.ndarray = support.ids[np.arange(len(columns)), np.minimum(columns, last)]
    return tokens.astype(np.int64)


def node_probabilities(support: Support, tokens: Sequence[int], parents: Sequence[int]) -> np.ndarray:
    """p~(token | parent) [N] float32 of every node of a tree; row 0 of `support` is the root, row i + 1 node i."""
    rows = np.asarray(parents, np.int64) + 1
    hits = support.ids[rows] == np.asarray(tokens, np.int64)[:, None]  # [N, S]
    probs: np.ndarray = np.where(hits, support.probs[rows], np.float32(0)).max(axis=1)
    return probs


def raw_distribution(
    logits: np.ndarray, temperature: float, tokens: Sequence[int], parents: Sequence[int]
) -> tuple[np.ndarray, np.ndarray]:
    """Of p = softmax(logits / T), nothing cut: p(token | parent) [N] of every node, H(p) [N + 1] in nats; float64.

    logits [N + 1, V] float32. Greedy is one-hot, as p~ is.
    """
    peaks = logits.argmax(axis=1)  # [N + 1]
    if temperature == GREEDY:
        return greedy_distribution(peaks, tokens, parents)
    rows = np.asarray(parents, np.int64) + 1
    probs, entropies = np.empty(len(tokens)), np.empty(len(logits))
    for row, scores in enumerate(logits):  # one row at a time: a float64 copy of all would be large
        shifted = (scores.astype(np.float64) - float(scores[peaks[row]])) / temperature
        exponentials = np.exp(shifted)
        total = exponentials.sum()
        entropies[row] = math.log(total) - (exponentials @ np.where(exponentials > 0, shifted, 0.0)) / total
        children = np.flatnonzero(rows == row)
        probs[children] = exponentials[np.asarray(tokens, np.int64)[children]] / total
    return probs, entropies


def greedy_distribution(
    peaks: np.ndarray, tokens: Sequence[int], parents: Sequence[int]
) -> tuple[np.ndarray, np.ndarray]:
    """`raw_distribution` at temperature 0 where the likeliest tokens are peaks [N + 1]."""
    rows = np.asarray(parents, np.int64) + 1
    return (peaks[rows] == np.asarray(tokens)).astype(np.float64), np.zeros(len(peaks))


def _top_k(scores: np.ndarray, top_k: int) -> tuple[np.ndarray, np.ndarray]:
    """ids [R, S] ascending and their scores; every token tied with the k-th stays. Short rows end in -inf."""
    vocab_size = scores.shape[1]
    if top_k == ALL or top_k >= vocab_size:
        return np.broadcast_to(np.arange(vocab_size), scores.shape), scores
    ids, candidates = _compact(scores, scores >= _floor(scores, top_k)[:, None])
    smallest = candidates.shape[1] - top_k
    threshold = np.partition(candidates, smallest, axis=1)[:, smallest]  # [R], the k-th score
    columns, kept = _compact(candidates, candidates >= threshold[:, None])
    return np.take_along_axis(ids, columns, axis=1), kept


def _floor(scores: np.ndarray, top_k: int) -> np.ndarray:
    """A number [R] that at least top_k scores of a row reach and few more: the k-th of the maxima of many groups.

    Ranking the maxima instead of the scores makes the cut ten times faster over 262,144 tokens.
    """
    count, vocab_size = scores.shape
    groups = GROUPS_PER_KEPT * top_k
    size = vocab_size // groups
    maxima = scores[:, : size * groups].reshape(count, size, groups).max(axis=1) if size > 1 else scores
    smallest = maxima.shape[1] - top_k
    return np.partition(maxima, smallest, axis=1)[:, smallest]


def _compact(scores: np.ndarray, mask: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Columns [R, M] where `mask` holds, ascending in every row, and the scores there; short rows end in 0 and -inf."""
    count, width = scores.shape
    flat = np.flatnonzero(mask)  # on one axis: several times faster than on two
    rows = flat // width
    per_row = np.bincount(rows, minlength=count)
    places = np.arange(len(rows)) - np.repeat(np.cumsum(per_row) - per_row, per_row)
    columns = np.zeros((count, per_row.max()), np.int64)
    kept = np.full(columns.shape, -np.inf, np.float32)
    columns[rows, places] = flat - rows * width
    kept[rows, places] = scores.ravel()[flat]
    return columns, kept


def _top_p(scores: np.ndarray, top_p: float) -> np.ndarray:
    """scores [R, S] with the least likely tail of mass <= 1 - top_p set to -inf; at least one token stays."""
    order = np.argsort(scores, axis=1, kind="stable")  # ascending: of equal scores the larger id is kept longer
    mass = np.cumsum(_softmax(np.take_along_axis(scores, order, axis=1)), axis=1, dtype=np.float64)
    removed = mass.astype(np.float32) <= np.float32(1 - top_p)
    removed[:, -1] = False
    cut = np.empty_like(removed)
    np.put_along_axis(cut, order, removed, axis=1)
    return np.where(cut, np.float32(-np.inf), scores)


def _softmax(scores: np.ndarray) -> np.ndarray:
    """Probabilities [R, S] float32 of scores [R, S] float32; differences in float32, sums in float64."""
    shifted = scores - scores.max(axis=1, keepdims=True)
    exponentials = np.exp(shifted, dtype=np.float64)
    probs: np.ndarray = exponentials / exponentials.sum(axis=1, keepdims=True)
    return probs.astype(np.float32)
