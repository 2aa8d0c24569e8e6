"""Parity of a run's graphs: the saved sample inputs through every device back end, compared pair by pair."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path

import msgspec
import numpy as np

from hyco_export.core.artifact import HEAD, HEAD_SAMPLES_FILE, SLM, SLM_SAMPLES_FILE
from hyco_export.core.device_spec import HEAD_GRAPH, SLM_TREE_GRAPH
from hyco_export.core.golden import read_samples
from hyco_export.core.numerics import logit_kl, max_abs, output_range, sqnr_db, top1_agreement
from hyco_export.device.backends import BACKENDS, Backend
from hyco_export.errors import ArtifactError
from hyco_export.evaluate.connect import OnStep, RunArtifacts

FLOAT, INTEGER, NPU = "torch", "onnx-cpu", "qnn"  # the device back ends, by what they compute in
COMPARISONS = ((FLOAT, INTEGER), (FLOAT, NPU), (INTEGER, NPU))  # reference, candidate
EMULATOR_FEEDS = 24  # of each graph: the emulator takes about a second a feed, the others milliseconds
CHAIN, RUNNER_UP, LOGITS = "chain", "runner_up", "logits"  # outputs, see core.device_spec
Feeds = Sequence[Mapping[str, np.ndarray]]
Arrays = list[np.ndarray]  # one per feed


class GraphParity(msgspec.Struct, frozen=True):
    """How a candidate back end compares with a reference on `positions` teacher-forced positions.

    Head: `agreement` is the share of equal drafted ids. SLM: the share of rows with the same best token; `kl_nats`,
    `sqnr_db` and `range_share` (largest difference over the reference's range) are of the logits.
    """

    graph: str
    reference: str
    candidate: str
    positions: int
    agreement: float
    agreement_by_depth: tuple[float, ...] = ()  # head: chain steps, then runner-ups
    kl_nats: float | None = None
    sqnr_db: float | None = None
    range_share: float | None = None


def compare_ids(
    graph: str, reference: str, candidate: str, wanted: Sequence[np.ndarray], found: Sequence[np.ndarray]
) -> GraphParity:
    """wanted, found: per feed the drafted ids [K + S].

    Raises:
        ValueError: no feeds, which would prove nothing.
    """
    left, right = _stacked(graph, wanted), _stacked(graph, found)
    equal = left == right  # [feeds, K + S]
    by_depth = tuple(float(share) for share in equal.mean(axis=0))
    return GraphParity(graph, reference, candidate, equal.size, float(equal.mean()), by_depth)


def compare_logits(
    graph: str, reference: str, candidate: str, wanted: Sequence[np.ndarray], found: Sequence[np.ndarray]
) -> GraphParity:
    """wanted, found: per feed the logits [rows, C] of the rows in use, in real units.

    Raises:
        ValueError: no feeds, which would prove nothing.
    """
    if not wanted:
        raise ValueError(f"no feeds to compare {graph} on")
    left, right = np.concatenate(wanted), np.concatenate(found)  # [positions, C]
    spread = output_range(left)
    return GraphParity(
        graph=graph,
        reference=reference,
        candidate=candidate,
        positions=len(left),
        agreement=top1_agreement(left, right),
        kl_nats=logit_kl(left, right),
        sqnr_db=sqnr_db(left, right),
        range_share=max_abs(left, right) / spread if spread else 0.0,
    )


def _stacked(graph: str, rows: Sequence[np.ndarray]) -> np.ndarray:
    if not rows:
        raise ValueError(f"no feeds to compare {graph} on")
    return np.stack([np.asarray(row).ravel() for row in rows])


Compare = Callable[[str, str, str, Sequence[np.ndarray], Sequence[np.ndarray]], GraphParity]


def compare_backends(artifacts: RunArtifacts, target: str, on_step: OnStep) -> tuple[GraphParity, ...]:
    """Head ids and SLM logits of every pair in COMPARISONS, on as many feeds as both ran.

    Raises:
        ArtifactError: sample feeds are missing.
        CompileError: a graph or a binary cannot be opened.
    """
    head_feeds = _samples(artifacts.root / HEAD / HEAD_SAMPLES_FILE, HEAD_GRAPH)
    slm_feeds = _samples(artifacts.root / SLM / SLM_SAMPLES_FILE, SLM_TREE_GRAPH)
    ids: dict[str, Arrays] = {}
    logits: dict[str, Arrays] = {}
    for done, (name, backend) in enumerate(BACKENDS.items()):
        limit = EMULATOR_FEEDS if name == NPU else None
        ids[name] = _head_ids(backend, artifacts.root, target, head_feeds[:limit])
        logits[name] = _slm_logits(backend, artifacts, target, slm_feeds[:limit])
        on_step("back ends on the saved feeds", done + 1, len(BACKENDS))
    return (*_pairs(HEAD_GRAPH, ids, compare_ids), *_pairs(SLM_TREE_GRAPH, logits, compare_logits))


def _samples(path: Path, graph: str) -> Feeds:
    samples = read_samples(path).get(graph)
    if not samples:
        raise ArtifactError(f"{path} holds no feeds of {graph}", f"build it again: hyco-export {path.parent.name}")
    return samples


def _head_ids(backend: Backend, run: Path, target: str, feeds: Feeds) -> Arrays:
    """Keep-set rows [K + S] per feed: the chain, then the runner-ups."""
    with closing(backend.head(run, target)) as session:
        outputs = [session.run(feed) for feed in feeds]
    return [np.concatenate([output[CHAIN], output[RUNNER_UP]]) for output in outputs]


def _slm_logits(backend: Backend, artifacts: RunArtifacts, target: str, feeds: Feeds) -> Arrays:
    """Real logits [R, C] per feed."""
    encoding = artifacts.slm.tree.output(LOGITS).encoding
    assert encoding is not None, "logits are quantised"
    tree, prefill = backend.slm(artifacts.root, target)
    with closing(tree), closing(prefill):
        return [encoding.dequantize(tree.run(feed)[LOGITS]) for feed in feeds]


def _pairs(graph: str, results: Mapping[str, Arrays], compare: Compare) -> Iterator[GraphParity]:
    for reference, candidate in COMPARISONS:
        count = min(len(results[reference]), len(results[candidate]))
        yield compare(graph, reference, candidate, results[reference][:count], results[candidate][:count])
