"""Parity: the same saved feeds through two back ends of one graph, compared as the drafters use them.

For the head that is the drafted ids; for the SLM the distribution over kept tokens. Pure comparison of what sessions
returned; knows no back ends.
"""

from collections.abc import Sequence

import msgspec
import numpy as np

from hyco_export.graph.parity import logit_kl, max_abs, output_range, sqnr_db, top1_agreement

FLOAT, INTEGER, NPU = "torch", "onnx-cpu", "qnn"  # the device back ends, by what they compute in


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
