"""How far two runs of the same graph are apart, and whether that is near enough.

Pure numpy measures on real (dequantised) arrays, the numeric gate, and a comparison of two sessions over saved feeds.
Knows no runtime: sessions come in through `GraphSession`.
"""

from collections.abc import Iterable, Mapping, Sequence

import msgspec
import numpy as np

from hyco_export.core.graphspec import GraphSession, GraphSpec, TensorSpec

# onnxruntime-qnn's own accuracy rule: a difference below this share of the output's range passes
OUTPUT_RANGE_SHARE = 0.004
EXACT_DB = 200.0  # reported for equal arrays instead of infinity, which JSON cannot hold; float32 ends near 150 dB


class OutputParity(msgspec.Struct, frozen=True):
    """How one output compares over all feeds."""

    name: str
    sqnr_db: float  # of the candidate against the reference
    max_abs: float  # largest difference, in real units
    max_steps: int | None  # the same in steps of the output's grid; None for plain integers
    range_share: float  # max_abs as a share of the reference's range
    equal_share: float  # of elements that are the same integer
    passed: bool


class ParityReport(msgspec.Struct, frozen=True):
    """How two sessions compare."""

    graph: str
    runs: int
    outputs: tuple[OutputParity, ...]

    @property
    def passed(self) -> bool:
        return all(output.passed for output in self.outputs)

    @property
    def worst_sqnr_db(self) -> float:
        return min(output.sqnr_db for output in self.outputs)


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


def passes_gate(
    truth: np.ndarray, reference: np.ndarray, candidate: np.ndarray, range_share: float = OUTPUT_RANGE_SHARE
) -> bool:
    """The numeric gate of one output against the float result `truth`.

    The candidate (NPU) may not be further from the float result than the reference (QDQ graph on the CPU) is; or it
    lies within `range_share` of the output's range around the reference.
    """
    if max_abs(truth, candidate) <= max_abs(truth, reference):
        return True
    return within_range(reference, candidate, range_share)


def within_range(reference: np.ndarray, candidate: np.ndarray, range_share: float = OUTPUT_RANGE_SHARE) -> bool:
    """Does the largest difference stay within `range_share` of the reference's range."""
    return max_abs(reference, candidate) <= range_share * output_range(reference)


def compare_sessions(
    reference: GraphSession,
    candidate: GraphSession,
    spec: GraphSpec,
    feeds: Iterable[Mapping[str, np.ndarray]],
    range_share: float = OUTPUT_RANGE_SHARE,
    min_equal_share: float = 1.0,
) -> ParityReport:
    """Run both sessions on every feed and compare output by output.

    Outputs with a grid are compared as real numbers against `range_share`; plain integers (ids) are compared for
    equality, and pass when at least `min_equal_share` of them are equal (a near-tie may fall either way).

    Raises:
        ValueError: no feeds, which would prove nothing.
    """
    pairs = [(reference.run(feed), candidate.run(feed)) for feed in feeds]
    if not pairs:
        raise ValueError(f"no feeds to compare {spec.name} on")
    return ParityReport(
        graph=spec.name,
        runs=len(pairs),
        outputs=tuple(_compare_output(tensor, pairs, range_share, min_equal_share) for tensor in spec.outputs),
    )


Pairs = Sequence[tuple[Mapping[str, np.ndarray], Mapping[str, np.ndarray]]]


def _compare_output(tensor: TensorSpec, pairs: Pairs, range_share: float, min_equal_share: float) -> OutputParity:
    wanted = np.stack([left[tensor.name] for left, _ in pairs])
    found = np.stack([right[tensor.name] for _, right in pairs])
    equal_share = float(np.mean(wanted == found))
    steps = int(max_abs(wanted, found)) if tensor.encoding else None
    if tensor.encoding:
        wanted, found = tensor.encoding.dequantize(wanted), tensor.encoding.dequantize(found)
    difference, spread = max_abs(wanted, found), output_range(wanted)
    return OutputParity(
        name=tensor.name,
        sqnr_db=sqnr_db(wanted, found),
        max_abs=difference,
        max_steps=steps,
        range_share=difference / spread if spread else 0.0 if difference == 0.0 else 1.0,
        equal_share=equal_share,
        passed=within_range(wanted, found, range_share) if tensor.encoding else equal_share >= min_equal_share,
    )
