"""The MTP head as one static graph: its K/V ring, its inputs, and its outputs as verifier ids.

All K steps use the root's position and write no K/V (HyCo, §3.1; transformers'
SinglePositionMultiTokenCandidateGenerator).

Legend: H the verifier's hidden size, W ring slots, N kv heads, d head dim, n rows, K steps, S steps with a runner-up.
"""

import numpy as np

from hyco_export.core.device_spec import GraphSession, HeadSpec, to_integers
from hyco_export.core.handoff import LAYER_TYPES, KvRows
from hyco_export.core.network.host import root_inputs
from hyco_export.core.ring import held_positions, slots
from hyco_export.device.interfaces import HeadDraft

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
        self._window = spec.graph.input(f"k.{LAYER_TYPES[0]}").shape[1]
        self.reset()

    def reset(self) -> None:
        """Forget every row."""
        names = [f"{kind}.{layer_type}" for kind in ("k", "v") for layer_type in LAYER_TYPES]
        self._rings = {name: self.spec.graph.input(name).zeros() for name in names}  # [N, W, d]
        self._first: int | None = None  # position of the oldest row since the reset
        self._length = 0

    def commit(self, rows: KvRows, first_position: int) -> None:
        """Copy K/V rows [n, N, d] of positions first_position ... into the ring.

        They follow its newest row, or precede its oldest where no newer position has the slot.
        """
        places = slots(first_position, rows.count, self._window)  # of more than W rows numpy leaves the last W
        for kind, by_type in (("k", rows.k), ("v", rows.v)):
            for layer_type, values in by_type.items():
                self._rings[f"{kind}.{layer_type}"][:, places] = values.transpose(1, 0, 2)
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
        spec = self.spec
        root = np.array([root_position])
        keys = held_positions(self._first or 0, self._length, self._window)  # [W]
        real = root_inputs(root, keys, spec.spans, spec.inv_freq, spec.mask_value)
        given = to_integers([tensor for tensor in spec.graph.inputs if tensor.name in real], real)
        return {"e": e[None], "h": h[None], **given, **self._rings}
