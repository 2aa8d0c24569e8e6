"""The host's work after an SLM pass, from logits to the best children of every row, at the paper's size.

The device's functions and a plain float64 log-softmax with a full partition take turns in one process.

Run: `make host-bench`. Times are this thread's CPU time, so that other processes disturb them less.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from hyco_export.core.encodings import Encoding
from hyco_export.core.numerics import MS_PER_S, log_softmax
from hyco_export.device.slm import log_probs_of
from hyco_export.device.tree_builder import best_columns

ROWS, COLUMNS, BEST = 32, 86_089, 32  # of a tree pass, of the keep set, children a row: the paper's
ENCODING = Encoding("uint16", float(np.float32(60 / 65_535)), 32_768)
SPREAD = 5_000  # of the integers: 4.6 nats
REPEATS = 15


@dataclass(frozen=True)
class Work:
    """One pass's results, and the milliseconds of log-probabilities and of the choice of columns."""

    log_probs: np.ndarray  # [R, C]
    best: np.ndarray  # [R, BEST]
    softmax_ms: float
    best_ms: float


def random_logits(rows: int, columns: int, seed: int) -> np.ndarray:
    """uint16 [rows, columns]."""
    drawn = np.random.default_rng(seed).normal(ENCODING.zero_point, SPREAD, (rows, columns))
    return np.clip(drawn, 0, 65_535).astype(np.uint16)


def plain_log_probs(logits: np.ndarray) -> np.ndarray:
    """float32 [R, C], by way of float64."""
    return log_softmax(ENCODING.dequantize(logits)).astype(np.float32)


def plain_best(values: np.ndarray, count: int) -> np.ndarray:
    """As `best_columns`, by a partition of all columns."""
    last = np.partition(values, len(values) - count)[len(values) - count]
    columns = np.flatnonzero(values >= last)
    return columns[np.argsort(-values[columns], kind="stable")][:count]


def run(
    logits: np.ndarray, softmax: Callable[[np.ndarray], np.ndarray], best: Callable[[np.ndarray, int], np.ndarray]
) -> Work:
    """One pass through two functions."""
    start = time.thread_time()
    log_probs = softmax(logits)
    middle = time.thread_time()
    columns = np.stack([best(row, BEST) for row in log_probs])
    end = time.thread_time()
    return Work(log_probs, columns, (middle - start) * MS_PER_S, (end - middle) * MS_PER_S)


def plain(logits: np.ndarray) -> Work:
    return run(logits, plain_log_probs, plain_best)


def device(logits: np.ndarray) -> Work:
    return run(logits, lambda integers: log_probs_of(integers, ENCODING), best_columns)


def main() -> None:
    logits = random_logits(ROWS, COLUMNS, seed=7)
    pairs = [(plain(logits), device(logits)) for _ in range(REPEATS)]
    print(f"{ROWS} rows of {COLUMNS:,} columns, medians of {REPEATS} passes each, ms")
    for name, works in zip(("plain", "device"), zip(*pairs, strict=True), strict=True):
        softmax_ms, best_ms = (
            float(np.median([getattr(work, part) for work in works])) for part in ("softmax_ms", "best_ms")
        )
        print(f"{name:7} log q {softmax_ms:6.2f}   best {BEST} {best_ms:6.2f}   together {softmax_ms + best_ms:6.2f}")
    first, second = pairs[0]
    print(f"largest difference of log q: {np.abs(first.log_probs - second.log_probs).max():.1e} nats")
    print(f"rows with other columns: {int((first.best != second.best).any(axis=1).sum())}")


if __name__ == "__main__":
    main()
