"""Units, limits and measures that several rooms share: log-softmax and signal-to-quantisation-noise ratio (SQNR)."""

import numpy as np

MS_PER_S = 1e3
BYTES_PER_MB = 1_000_000
BITS_PER_MBIT = 1e6

# limits that both sides of the wire keep, and that recipes are checked against
COLDEST, HOTTEST = 0.01, 100.0  # temperatures other than 0; outside, float32 scores overflow or lose all differences
NODE_LIMIT = 64  # nodes of a draft tree, the root not counted: twice the paper's budget of 32

EXACT_DB = 200.0  # reported for equal arrays instead of infinity, which JSON cannot hold; float32 ends near 150 dB


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """float64 [..., V] of logits [..., V] over the last axis: device and proofs add up many of such values."""
    shifted = logits.astype(np.float64)
    shifted -= shifted.max(axis=-1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return shifted


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
