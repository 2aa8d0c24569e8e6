"""A graph session that only remembers what it was fed: the device's host code is judged by it. Knows no network.

Legend: R rows of a pass, W ring slots, N kv heads, d head dim.
"""

from collections.abc import Callable, Mapping

import numpy as np

from hyco_export.core.graphspec import GraphSpec

Outputs = Callable[[Mapping[str, np.ndarray]], dict[str, np.ndarray]]


class Recorder:
    """A `GraphSession`: keeps the newest feeds, answers with what `outputs` makes of them."""

    def __init__(self, outputs: Outputs) -> None:
        self._outputs = outputs
        self.feeds: dict[str, np.ndarray] = {}

    def run(self, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        self.feeds = {name: np.array(values) for name, values in feeds.items()}  # rings are changed in place later
        return self._outputs(self.feeds)

    def close(self) -> None:
        """Nothing to release."""


def zeros(graph: GraphSpec) -> Outputs:
    """Outputs that are all 0."""
    return lambda _: {spec.name: np.zeros(spec.shape, spec.dtype) for spec in graph.outputs}


def visible_rows(graph: GraphSpec, feeds: Mapping[str, np.ndarray], ring: str, mask: str, row: int) -> list[bytes]:
    """Bytes of the ring rows that row `row` of a pass may see; `ring` names an input [N, W, d], `mask` one [R, ...]."""
    encoding = graph.input(mask).encoding
    assert encoding is not None  # masks are real numbers on a grid
    shown = encoding.quantize(np.zeros(1))[0]
    slots = np.flatnonzero(feeds[mask][row][: feeds[ring].shape[1]] == shown)
    return [feeds[ring][:, slot].tobytes() for slot in slots]
