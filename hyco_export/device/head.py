"""The MTP head as one static graph: its K/V ring, its inputs, and its outputs as verifier ids.

All K steps use the root's position and write no K/V (HyCo, §3.1; transformers'
SinglePositionMultiTokenCandidateGenerator).

Legend: H the verifier's hidden size, W ring slots, N kv heads, d head dim, n rows, K steps, S steps with a runner-up.
"""

import numpy as np

from hyco_export.core.device_spec import GraphSession, HeadSpec, to_integers
from hyco_export.core.handoff import LAYER_TYPES, KvRows
from hyco_export.core.ring import rotary_tables, visible
from hyco_export.device.interfaces import HeadDraft
from hyco_export.device.kv_state import KvRing, held_positions

NO_ROWS = np.zeros(0, np.int32)  # of a graph without runner-ups


class GraphHead:
    """`interfaces.HeadDevice` over a graph.

    Args:
        spec: the head artifact.
        kept_ids: [C] verifier ids of the kept rows.
        session: runs `spec.graph`.
    """

    def __init__(self, spec: HeadSpec, kept_ids: np.ndarray, session: GraphSession) -> None:
        self.spec = spec
        self.kept_ids = kept_ids
        self._session = session
        self._rings = {layer_type: KvRing(spec.graph, layer_type) for layer_type in LAYER_TYPES}
        self._first: int | None = None  # position of the oldest row since the reset
        self._length = 0

    def reset(self) -> None:
        """Forget every row."""
        for ring in self._rings.values():
            ring.clear()
        self._first, self._length = None, 0

    def commit(self, rows: KvRows, first_position: int) -> None:
        """Copy K/V rows [n, N, d] of positions first_position ... into the ring.

        They follow its newest row, or precede its oldest where no newer position has the slot.
        """
        for layer_type, ring in self._rings.items():
            ring.write(first_position, rows.k[layer_type].transpose(1, 0, 2), rows.v[layer_type].transpose(1, 0, 2))
        self._first = first_position if self._first is None else min(self._first, first_position)
        self._length = max(self._length, first_position + rows.count)

    def draft(self, e: np.ndarray, h: np.ndarray, root_position: int) -> HeadDraft:
        """Chain and runner-ups in verifier ids, from e(root) and h uint8 [H]; the ring ends right before the root."""
        outputs = self._session.run(self._feeds(e, h, root_position))
        chain, runner_up = self.kept_ids[outputs["chain"]], self.kept_ids[outputs.get("runner_up", NO_ROWS)]
        return HeadDraft(tuple(map(int, chain)), tuple(map(int, runner_up)))

    def close(self) -> None:
        """Release the graph."""
        self._session.close()

    def _feeds(self, e: np.ndarray, h: np.ndarray, root_position: int) -> dict[str, np.ndarray]:
        root = np.array([root_position])
        real: dict[str, np.ndarray] = {}
        feeds = {"e": e[None], "h": h[None]}
        for layer_type, ring in self._rings.items():
            held = held_positions(self._first or 0, self._length, ring.capacity)
            seen = visible(root, held, self.spec.spans[layer_type])  # [1, W]
            real[f"mask.{layer_type}"] = np.where(seen, 0.0, self.spec.mask_value)
            cos, sin = rotary_tables(root, self.spec.inv_freq[layer_type])  # [1, d] each
            real[f"cos.{layer_type}"], real[f"sin.{layer_type}"] = cos, sin
            feeds |= ring.arrays
        return feeds | to_integers([spec for spec in self.spec.graph.inputs if spec.name in real], real)
