"""Units, limits and measures that several rooms share, such as log-softmax and SQNR (signal to quantisation noise)."""

from collections.abc import Sequence

import numpy as np

MS_PER_S = 1e3
BYTES_PER_MB = 1_000_000
BITS_PER_MBIT = 1e6

# limits that both sides of the wire keep, and that recipes are checked against
COLDEST, HOTTEST = 0.01, 100.0  # temperatures other than 0; outside, float32 scores overflow or lose all differences
NODE_LIMIT = 64  # nodes of a draft tree, the root not counted: twice the paper's budget of 32

LOG_SOFTMAX_BOUND = 2.0**-20  # of `log_softmax_rows`; float32 rounds to 2**-24
EXACT_DB = 200.0  # reported for equal arrays instead of infinity, which JSON cannot hold; float32 ends near 150 dB


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """float64 [..., V] of logits [..., V] over the last axis, for proofs; the device takes `log_softmax_rows`."""
    shifted = logits.astype(np.float64)
    shifted -= shifted.max(axis=-1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return shifted


def log_softmax_rows(levels: np.ndarray, scale: float) -> np.ndarray:
    """`log_softmax` of levels * scale for the device's rounds: float32 [n, C], written over float32 levels [n, C].

    Exponentials are float32 and their sum float64, a row at a time: a row of 86,089 stays in the processor's cache.
    Differs from `log_softmax` by at most LOG_SOFTMAX_BOUND * (1 + span), the span from a row's smallest to its largest
    product.
    """
    shares = np.empty(levels.shape[-1], np.float32)
    for row in levels:
        row -= row.max()  # first: exact where the levels are integers
        row *= np.float32(scale)
        np.exp(row, out=shares)
        row -= np.float32(np.log(shares.sum(dtype=np.float64)))
    return levels


def sqnr_db(reference: np.ndarray, candidate: np.ndarray) -> float:
    """SQNR in dB of `candidate` [...] against `reference` [...]; EXACT_DB when they are equal."""
    signal = np.asarray(reference, np.float64)
    noise = signal - np.asarray(candidate, np.float64)
    return decibels(float(np.sum(signal**2)), float(np.sum(noise**2)))


def decibels(signal_power: float, noise_power: float) -> float:
    """10 log10(signal / noise), at most EXACT_DB; EXACT_DB without noise, -EXACT_DB for noise without signal."""
    if noise_power == 0.0:
        return EXACT_DB
    if signal_power == 0.0:
        return -EXACT_DB
    return min(EXACT_DB, 10.0 * float(np.log10(signal_power / noise_power)))


def max_abs(reference: np.ndarray, candidate: np.ndarray) -> float:
    """Largest absolute difference."""
    return float(np.max(np.abs(np.asarray(reference, np.float64) - np.asarray(candidate, np.float64)), initial=0.0))


def top1_agreement(reference: np.ndarray, candidate: np.ndarray) -> float:
    """Share of rows [..., V] whose largest element is at the same place."""
    return float(np.mean(np.argmax(reference, axis=-1) == np.argmax(candidate, axis=-1)))


def logit_kl(reference: np.ndarray, candidate: np.ndarray) -> float:
    """Mean KL divergence in nats, KL(softmax(reference) || softmax(candidate)), over rows [..., V] of logits."""
    log_p, log_q = log_softmax(reference), log_softmax(candidate)
    return float(np.mean(np.sum(np.exp(log_p) * (log_p - log_q), axis=-1)))


def output_range(reference: np.ndarray) -> float:
    """Largest minus smallest element; 0.0 for an empty or constant array."""
    values = np.asarray(reference, np.float64)
    return float(values.max() - values.min()) if values.size else 0.0


def along(points: Sequence[tuple[float, float]], at: float) -> float:
    """A curve of points (x, y), x increasing, at one x: linear between the points and, along the last two, beyond them;
    before the first one its y."""
    x, y = np.array(points, np.float64).T
    if at > x[-1] and len(x) > 1:
        return float(y[-1] + (at - x[-1]) * (y[-1] - y[-2]) / (x[-1] - x[-2]))
    return float(np.interp(at, x, y))
