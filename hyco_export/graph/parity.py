"""Parity of two runs of the same graph: limits, and a comparison of sessions over saved feeds.

Measures are on real (dequantised) arrays; sessions are any `GraphSession`. `ReferenceSession` runs a QDQ graph on the
CPU exactly as written: the reference that every compiled graph is compared with.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import onnxruntime as ort

from hyco_export.core.device_spec import GraphSession, GraphSpec, TensorSpec
from hyco_export.core.encodings import Encoding
from hyco_export.core.numerics import max_abs, output_range, sqnr_db
from hyco_export.errors import CompileError

ROUNDING = 1e-5  # float32 noise of dequantising: one step may come out as 1.000001 steps
DATA_FOLDER_KEY = "session.model_external_initializers_file_folder_path"
ERROR_SEVERITY = 3  # ONNX Runtime's warnings about foreign nodes are of no use here
# From the second run on ONNX Runtime plans one block for all tensors of a run, beside what the first run allocated: a
# tenth of a small graph's time saved, and 1.5 GB more for a head of real size
LARGE_MODEL_BYTES = 5_000_000


class ParityLimits(msgspec.Struct, frozen=True):
    """Limits of a comparison.

    An element of a real output is inside when the candidate is at least as near to the float result as the reference
    is, or differs from the reference by at most one step of the output's encoding or by `output_range_share` of its
    range (onnxruntime-qnn's own accuracy rule).
    """

    output_range_share: float = 0.004
    max_outside_share: float = 0.01  # of an output's elements: rounding gives 0.0007, a wrong operator tens of %
    min_equal_share: float = 0.97  # of ids: a near-tie may fall either way


class OutputParity(msgspec.Struct, frozen=True):
    """One output over all feeds.

    Differences are in real units, from the reference; plain integers have no `max_steps` and no float result.
    """

    name: str
    sqnr_db: float  # of the candidate against the reference
    max_abs: float
    max_steps: int | None  # the same in steps of the output's encoding
    range_share: float  # the same as a share of the reference's range
    equal_share: float  # of elements that are the same integer
    outside_share: float  # of elements that break the limits
    float_sqnr_db: float | None  # of the candidate against the float result
    reference_float_sqnr_db: float | None  # of the reference against the float result
    passed: bool


class ParityReport(msgspec.Struct, frozen=True):
    """The comparison of two sessions, output by output."""

    graph: str
    runs: int
    outputs: tuple[OutputParity, ...]

    @property
    def passed(self) -> bool:
        return all(output.passed for output in self.outputs)


def outside_share(
    reference: np.ndarray, candidate: np.ndarray, tolerance: float, float_result: np.ndarray | None = None
) -> float:
    """Share of elements that differ from the reference by more than `tolerance`; real arrays of one shape.

    Where the float result is known, an element must also be further from it than the reference is.
    """
    wanted, found = np.asarray(reference, np.float64), np.asarray(candidate, np.float64)
    outside = np.abs(found - wanted) > tolerance * (1 + ROUNDING)
    if float_result is not None:
        exact = np.asarray(float_result, np.float64)
        outside &= np.abs(found - exact) > np.abs(wanted - exact) * (1 + ROUNDING)
    return float(np.mean(outside))


def compare_sessions(
    reference: GraphSession,
    candidate: GraphSession,
    spec: GraphSpec,
    feeds: Iterable[Mapping[str, np.ndarray]],
    limits: ParityLimits = ParityLimits(),  # noqa: B008 (frozen)
    float_session: GraphSession | None = None,
) -> ParityReport:
    """Run all sessions on every feed and compare output by output.

    Args:
        reference: the QDQ graph on the CPU.
        candidate: the compiled graph.
        spec: what is compared; outputs with an encoding as real numbers, plain integers (ids) for equality.
        float_session: the float network with the same integers in and out, where there is one.

    Raises:
        ValueError: no feeds, which would prove nothing.
    """
    runs = [
        Run(reference.run(feed), candidate.run(feed), float_session.run(feed) if float_session is not None else None)
        for feed in feeds
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
    float_result: Mapping[str, np.ndarray] | None


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


def _compare_reals(name: str, encoding: Encoding, runs: Sequence[Run], limits: ParityLimits) -> OutputParity:
    wanted_levels = np.stack([run.reference[name] for run in runs])
    found_levels = np.stack([run.candidate[name] for run in runs])
    wanted, found = encoding.dequantize(wanted_levels), encoding.dequantize(found_levels)
    float_levels = [run.float_result[name] for run in runs if run.float_result is not None]
    exact = encoding.dequantize(np.stack(float_levels)) if float_levels else None
    tolerance = max(limits.output_range_share * output_range(wanted), encoding.scale)
    outside = outside_share(wanted, found, tolerance, exact)
    return OutputParity(
        name=name,
        sqnr_db=sqnr_db(wanted, found),
        max_abs=max_abs(wanted, found),
        max_steps=int(max_abs(wanted_levels, found_levels)),
        range_share=_share_of_range(wanted, found),
        equal_share=float(np.mean(wanted_levels == found_levels)),
        outside_share=outside,
        float_sqnr_db=None if exact is None else sqnr_db(exact, found),
        reference_float_sqnr_db=None if exact is None else sqnr_db(exact, wanted),
        passed=outside <= limits.max_outside_share,
    )


def _share_of_range(reference: np.ndarray, candidate: np.ndarray) -> float:
    difference, spread = max_abs(reference, candidate), output_range(reference)
    if spread:
        return difference / spread
    return 0.0 if difference == 0.0 else 1.0


class ReferenceSession:
    """A `GraphSession` on the CPU; integers (or floats, for a float graph) in and out by name.

    Args:
        model: ONNX file (external data beside it) or the serialised model.
        threads: of one operator.
        data_folder: where the external data of a serialised model lies, if it has some.

    Raises:
        CompileError: no such file, or not a model that ONNX Runtime can run.
    """

    def __init__(self, model: Path | bytes, threads: int = 1, data_folder: Path | None = None) -> None:
        if isinstance(model, Path) and not model.is_file():
            raise CompileError(f"{model} does not exist", "build the stage before this one: hyco-export run")
        settings = ort.SessionOptions()
        settings.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        settings.intra_op_num_threads = threads
        settings.inter_op_num_threads = 1
        settings.enable_mem_pattern = _bytes_of(model) < LARGE_MODEL_BYTES
        settings.log_severity_level = ERROR_SEVERITY
        if data_folder is not None:
            settings.add_session_config_entry(DATA_FOLDER_KEY, str(data_folder))
        name = "the graph" if isinstance(model, bytes) else str(model)
        source = model if isinstance(model, bytes) else str(model)
        try:
            self._session = ort.InferenceSession(source, settings, providers=["CPUExecutionProvider"])
        except Exception as error:  # ONNX Runtime's exceptions share no base class of their own
            words = " ".join(str(error).split())
            raise CompileError(f"ONNX Runtime cannot open {name}: {words}", "convert it again") from error
        self.inputs = tuple(_tensor_spec(node) for node in self._session.get_inputs())
        self.outputs = tuple(_tensor_spec(node) for node in self._session.get_outputs())
        self._output_names = [spec.name for spec in self.outputs]

    def run(self, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Outputs by name."""
        return dict(zip(self._output_names, self._session.run(None, dict(feeds)), strict=True))

    def close(self) -> None:
        """Nothing to do: memory is freed with the object."""


def _bytes_of(model: Path | bytes) -> int:
    """Size without external data: graphs that have some are large by their nodes alone."""
    return len(model) if isinstance(model, bytes) else model.stat().st_size


def _tensor_spec(node: ort.NodeArg) -> TensorSpec:
    """ONNX Runtime says `tensor(uint16)`; inside is numpy's name (`float` means float32)."""
    kind = node.type.removeprefix("tensor(").removesuffix(")")
    return TensorSpec(node.name, tuple(node.shape), {"float": "float32"}.get(kind, kind))
