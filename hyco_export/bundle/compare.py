"""Compares what came back from a device with a bundle's golden outputs, tensor by tensor, and names likely causes.

A vector's outputs are held against the emulator's where the bundle has them, else against the integer graph's. Real
outputs: an element is off when it differs by more than the tensor's `tolerance_steps`; a tensor is within while few
elements are. Ids: a graph is within while enough of all its ids are equal, for near-ties fall either way.
"""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np

from hyco_export.bundle.causes import Pair, likely_causes
from hyco_export.bundle.outputs import read_outputs
from hyco_export.bundle.raw_files import Read, to_levels
from hyco_export.bundle.spec import EMULATOR, INTEGER, Bundle, Case, Tensor, Tolerance, load_arrays, open_bundle
from hyco_export.errors import counted

EQUAL, WITHIN, OUTSIDE, MISSING = "equal", "within", "outside", "missing"
FAILED = (OUTSIDE, MISSING)


class TensorVerdict(msgspec.Struct, frozen=True):
    """One output of one golden vector."""

    graph: str
    case: str
    tensor: str
    verdict: str
    origin: str  # of what it is compared with
    by: str  # how far it is off, in words
    equal_share: float = 0.0  # of its elements that are the golden integer
    outside_share: float = 1.0  # of its elements that are off by more than the tolerance; of ids: that differ


class Comparison(msgspec.Struct, frozen=True):
    """All verdicts, and what explains the failed ones by graph."""

    tensors: tuple[TensorVerdict, ...]
    notes: tuple[str, ...]
    causes: dict[str, tuple[str, ...]]

    @property
    def passed(self) -> bool:
        return not any(one.verdict in FAILED for one in self.tensors)

    @property
    def summary(self) -> str:
        seen = Counter(one.verdict for one in self.tensors)
        parts = [f"{seen[verdict]} {verdict}" for verdict in (EQUAL, WITHIN, OUTSIDE, MISSING) if seen[verdict]]
        return f"{'pass' if self.passed else 'FAIL'}: {counted(len(self.tensors), 'output')}: {', '.join(parts)}"


def compare(folder: Path, outputs: Path) -> Comparison:
    """Judge the outputs in a folder.

    Raises:
        ArtifactError: the bundle is damaged, or the outputs are none of its.
    """
    bundle = open_bundle(folder)
    found = read_outputs(bundle, outputs)
    verdicts: list[TensorVerdict] = []
    causes: dict[str, tuple[str, ...]] = {}
    notes = []
    for graph in bundle.graphs:
        cases = [
            case
            for case in bundle.cases
            if case.graph == graph and (case.id, bundle.graphs[graph].outputs[0].name) in found
        ]
        if not cases:
            notes.append(f"{graph}: no outputs came back, nothing is said of it")
            continue
        own, pairs = _judge(folder, bundle, graph, cases, found)
        verdicts += own
        failed = [one for one in own if one.verdict == OUTSIDE]
        if failed:
            causes[graph] = tuple(
                likely_causes(folder, bundle, graph, pairs, {(one.case, one.tensor) for one in failed})
            )
        absent = sorted({one.tensor for one in own if one.verdict == MISSING})
        if absent:
            words = dict.fromkeys(one.by for one in own if one.verdict == MISSING)
            causes[graph] = (*causes.get(graph, ()), *(f"{', '.join(absent)}: {word}" for word in list(words)[:3]))
    if any(read.floats for read in found.values()):
        notes.append(
            "some outputs came as float32 and were quantised again: give qnn-net-run --use_native_output_files"
        )
    return Comparison(tuple(verdicts), tuple(notes), causes)


def _judge(
    folder: Path, bundle: Bundle, graph: str, cases: Sequence[Case], found: dict[tuple[str, str], Read]
) -> tuple[list[TensorVerdict], list[Pair]]:
    tensors = bundle.graphs[graph].outputs
    verdicts, pairs = [], []
    equal_ids = ids = 0
    for case in cases:
        origin = EMULATOR if EMULATOR in case.outputs else INTEGER
        golden = load_arrays(folder, case.outputs[origin], [tensor.spec for tensor in tensors])
        for tensor in tensors:
            read = found[case.id, tensor.name]
            if read.values is None:
                verdicts.append(TensorVerdict(graph, case.id, tensor.name, MISSING, origin, read.problem))
                continue
            levels = to_levels(read.values, tensor.spec)
            wanted, seen = (tensor.in_use(values, case.rows) for values in (golden[tensor.name], levels))
            pairs.append(Pair(case, tensor, golden[tensor.name], levels))
            verdict, by = verdict_of(tensor, wanted, seen, bundle.tolerance)
            if tensor.scale is None:
                equal_ids, ids = equal_ids + int((wanted == seen).sum()), ids + seen.size
            off = np.abs(wanted.astype(np.int64) - seen)
            shares = float((off == 0).mean()), float((off > (tensor.tolerance_steps or 0)).mean())
            verdicts.append(TensorVerdict(graph, case.id, tensor.name, verdict, origin, by, *shares))
    if equal_ids < bundle.tolerance.equal_ids_share * ids:
        near = {tensor.name for tensor in tensors if tensor.scale is None}
        verdicts = [
            msgspec.structs.replace(one, verdict=OUTSIDE) if one.tensor in near and one.verdict == WITHIN else one
            for one in verdicts
        ]
    return verdicts, pairs


def verdict_of(tensor: Tensor, golden: np.ndarray, found: np.ndarray, tolerance: Tolerance) -> tuple[str, str]:
    """EQUAL, WITHIN or OUTSIDE for one tensor, and by how much; different ids count as WITHIN here."""
    off = np.abs(golden.astype(np.int64) - found.astype(np.int64))
    if not off.any():
        return EQUAL, ""
    if tensor.scale is None:
        return WITHIN, f"{int((off > 0).sum())} of {off.size} ids differ"
    share = float((off > (tensor.tolerance_steps or 0)).mean())
    spread = max(int(np.ptp(golden.astype(np.int64))), 1)
    by = f"up to {int(off.max()):,} steps ({off.max() / spread:.2%} of the range); {share:.2%} of the elements are off"
    return (WITHIN if share <= tolerance.outside_share else OUTSIDE), by
