"""How far two runs of the same graph are apart, and whether that is near enough.

Pure numpy measures on real (dequantised) arrays, the numeric gate, and a comparison of sessions over saved feeds.
Knows no runtime: sessions come in through `GraphSession`.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from hyco_export.core.encodings import Encoding
from hyco_export.core.graphspec import GraphSession, GraphSpec

EXACT_DB = 200.0  # reported for equal arrays instead of infinity, which JSON cannot hold; float32 ends near 150 dB
ROUNDING = 1e-5  # float32 noise of dequantising: one step may come out as 1.000001 steps


class ParityLimits(msgspec.Struct, frozen=True):
    """How near is near enough. An element of a real output is inside when the candidate is at least as near to the
    float result as the reference is, or differs from the reference by at most one step of the output's grid or by
    `output_range_share` of its range (onnxruntime-qnn's own accuracy rule)."""

    output_range_share: float = 0.004
    max_outside_share: float = (
        0.01  # of an output's elements: rounding's tail (0.0007 seen); a wrong operator gives tens of %
    )
    min_equal_share: float = 0.97  # of ids: a near-tie may fall either way


class OutputParity(msgspec.Struct, frozen=True):
    """How one output compares over all feeds. Differences are in real units, from the reference; plain integers have
    no `max_steps` and no float result."""

    name: str
    sqnr_db: float  # of the candidate against the reference
    max_abs: float
    max_steps: int | None  # the same in steps of the output's grid
    range_share: float  # the same as a share of the reference's range
    equal_share: float  # of elements that are the same integer
    outside_share: float  # of elements that break the limits
    float_sqnr_db: float | None  # of the candidate against the float result
    reference_float_sqnr_db: float | None  # of the reference against the float result
    passed: bool


class ParityReport(msgspec.Struct, frozen=True):
    """How two sessions compare."""

    graph: str
    runs: int
    outputs: tuple[OutputParity, ...]

    @property
    def passed(self) -> bool:
        return all(output.passed for output in self.outputs)


def sqnr_db(reference: np.ndarray, candidate: np.ndarray) -> float:
    """Signal-to-noise ratio in dB of `candidate` [...] against `reference` [...]; EXACT_DB when they are equal."""
    signal = np.asarray(reference, np.float64)
    noise_power = float(np.sum((signal - np.asarray(candidate, np.float64)) ** 2))
    signal_power = float(np.sum(signal**2))
    if noise_power == 0.0:
        return EXACT_DB
    if signal_power == 0.0:
        return -EXACT_DB
    return min(EXACT_DB, 10 * float(np.log10(signal_power / noise_power)))


def max_abs(reference: np.ndarray, candidate: np.ndarray) -> float:
    """Largest absolute difference."""
    return float(np.max(np.abs(np.asarray(reference, np.float64) - np.asarray(candidate, np.float64)), initial=0.0))


def top1_agreement(reference: np.ndarray, candidate: np.ndarray) -> float:
    """Share of rows [..., V] whose largest element is at the same place."""
    return float(np.mean(np.argmax(reference, axis=-1) == np.argmax(candidate, axis=-1)))


def logit_kl(reference: np.ndarray, candidate: np.ndarray) -> float:
    """Mean KL divergence in nats, KL(softmax(reference) || softmax(candidate)), over rows [..., V] of logits."""
    log_p, log_q = _log_softmax(reference), _log_softmax(candidate)
    return float(np.mean(np.sum(np.exp(log_p) * (log_p - log_q), axis=-1)))


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    values = np.asarray(logits, np.float64)
    shifted = values - values.max(axis=-1, keepdims=True)
    return shifted - np.log(np.sum(np.exp(shifted), axis=-1, keepdims=True))


def output_range(reference: np.ndarray) -> float:
    """Largest minus smallest element; 0.0 for an empty or constant array."""
    values = np.asarray(reference, np.float64)
    return float(values.max() - values.min()) if values.size else 0.0


def outside_share(
    reference: np.ndarray, candidate: np.ndarray, tolerance: float, truth: np.ndarray | None = None
) -> float:
    """Share of elements where the candidate differs from the reference by more than `tolerance` and, where the float
    result `truth` is known, is further from it than the reference is. Real arrays of one shape."""
    wanted, found = np.asarray(reference, np.float64), np.asarray(candidate, np.float64)
    outside = np.abs(found - wanted) > tolerance * (1 + ROUNDING)
    if truth is not None:
        exact = np.asarray(truth, np.float64)
        outside &= np.abs(found - exact) > np.abs(wanted - exact) * (1 + ROUNDING)
    return float(np.mean(outside))


def compare_sessions(
    reference: GraphSession,
    candidate: GraphSession,
    spec: GraphSpec,
    feeds: Iterable[Mapping[str, np.ndarray]],
    limits: ParityLimits = ParityLimits(),  # noqa: B008 (frozen)
    truth: GraphSession | None = None,
) -> ParityReport:
    """Run all sessions on every feed and compare output by output.

    Args:
        reference: the QDQ graph on the CPU.
        candidate: the compiled graph.
        spec: what is compared; outputs with a grid as real numbers, plain integers (ids) for equality.
        truth: the float network behind the same integers, where there is one.

    Raises:
        ValueError: no feeds, which would prove nothing.
    """
    runs = [
        Run(reference.run(feed), candidate.run(feed), truth.run(feed) if truth is not None else None) for feed in feeds
    ]
    if not runs:
        raise ValueError(f"no feeds to compare {spec.name} on")
    return ParityReport(
        graph=spec.name,
        runs=len(runs),
        outputs=tuple(
            _compare_ids(tensor.name, runs, limits)
            if tensor.encoding is None
            else _compare_reals(tensor.name, tensor.encoding, runs, limits)
            for tensor in spec.outputs
        ),
    )


class Run(NamedTuple):
    """What the sessions gave for one feed."""

    reference: Mapping[str, np.ndarray]
    candidate: Mapping[str, np.ndarray]
    truth: Mapping[str, np.ndarray] | None


def _compare_ids(name: str, runs: Sequence[Run], limits: ParityLimits) -> OutputParity:
    wanted = np.stack([run.reference[name] for run in runs])
    found = np.stack([run.candidate[name] for run in runs])
    equal = float(np.mean(wanted == found))
    return OutputParity(
        name=name,
        sqnr_db=sqnr_db(wanted, found),
        max_abs=max_abs(wanted, found),
        max_steps=None,
        range_share=_share_of_range(wanted, found),
        equal_share=equal,
        outside_share=1.0 - equal,
        float_sqnr_db=None,
        reference_float_sqnr_db=None,
        passed=equal >= limits.min_equal_share,
    )


def _compare_reals(name: str, grid: Encoding, runs: Sequence[Run], limits: ParityLimits) -> OutputParity:
    wanted_levels = np.stack([run.reference[name] for run in runs])
    found_levels = np.stack([run.candidate[name] for run in runs])
    wanted, found = grid.dequantize(wanted_levels), grid.dequantize(found_levels)
    exact = [run.truth[name] for run in runs if run.truth is not None]
    truth = grid.dequantize(np.stack(exact)) if exact else None
    tolerance = max(limits.output_range_share * output_range(wanted), grid.scale)
    outside = outside_share(wanted, found, tolerance, truth)
    return OutputParity(
        name=name,
        sqnr_db=sqnr_db(wanted, found),
        max_abs=max_abs(wanted, found),
        max_steps=int(max_abs(wanted_levels, found_levels)),
        range_share=_share_of_range(wanted, found),
        equal_share=float(np.mean(wanted_levels == found_levels)),
        outside_share=outside,
        float_sqnr_db=None if truth is None else sqnr_db(truth, found),
        reference_float_sqnr_db=None if truth is None else sqnr_db(truth, wanted),
        passed=outside <= limits.max_outside_share,
    )


def _share_of_range(reference: np.ndarray, candidate: np.ndarray) -> float:
    difference, spread = max_abs(reference, candidate), output_range(reference)
    if spread:
        return difference / spread
    return 0.0 if difference == 0.0 else 1.0
