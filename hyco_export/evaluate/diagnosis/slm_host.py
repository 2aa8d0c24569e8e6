"""Does the device's host code feed the SLM what it should? As `head_host`, for passes over trees and rings.

The recorded passes answer with unique random K/V rows, so that what a later pass sees is told by content.

Legend: R rows of a pass, W ring slots, N kv heads, d head dim.
"""

from collections.abc import Iterator, Mapping

import numpy as np

from hyco_export.core.devicespec import SlmSpec
from hyco_export.core.graphspec import GraphSpec
from hyco_export.core.network.slm_host import EmbeddingRows
from hyco_export.evaluate.diagnosis.finding import Finding
from hyco_export.evaluate.diagnosis.head_host import judge_rows
from hyco_export.evaluate.diagnosis.recorder import Recorder, visible_rows
from hyco_export.runtime.devices.slm import GraphSlm

WHERE = "the device's host code of the SLM"
REPORT = "report it: runtime/devices or runtime/feeds were changed"
PARENTS = (-1, 0, 0, 1, 3)  # a forest whose rows are no chain: row 4's path is 0, 1, 3
PATH = (0, 1, 3)
SEED = 20261011
LOG_PROB_NATS = 1e-2  # float32 beside float64, for logits of a few thousand at most


def slm_host_findings(spec: SlmSpec, embeddings: EmbeddingRows) -> list[Finding]:
    """What tree passes see behind contexts that end at every edge of span and rings."""
    span = spec.spans["sliding"] or spec.rings["sliding"]
    edges = sorted({edge + offset for edge in (span, *spec.rings.values()) for offset in (-1, 0, 1)})
    findings: list[Finding] = []
    for context in (1, *(edge - 1 for edge in edges if edge > 2), edges[-1] + spec.rows):
        findings += list(_Trial(spec, embeddings).run(context))
        if findings:
            break
    return findings


class _Trial:
    """One context, one pass, a commit, and another pass."""

    def __init__(self, spec: SlmSpec, embeddings: EmbeddingRows) -> None:
        self._spec = spec
        self._rng = np.random.default_rng(SEED)
        self._made: list[dict[str, np.ndarray]] = []  # outputs of every pass
        self._tree = Recorder(lambda _: self._outputs(spec.tree))
        prefill = Recorder(lambda _: self._outputs(spec.prefill))
        self._slm = GraphSlm(spec, embeddings, self._tree, prefill)
        self._places: list[tuple[int, int]] = []  # (pass, row) of every committed position

    def run(self, context: int) -> Iterator[Finding]:
        tokens = np.arange(context) % self._spec.vocab_size
        self._slm.reset()
        self._slm.prefill(tokens)
        self._places = [divmod(position, self._spec.prefill_rows) for position in range(context)]
        forest = np.arange(len(PARENTS)), np.array(PARENTS)
        for _ in range(2):
            log_probs = self._slm.tree_pass(*forest)
            yield from self._look()
            yield from self._look_at_probabilities(log_probs)
            self._slm.commit(np.array(PATH))
            self._places += [(len(self._made) - 1, row) for row in PATH]

    def _outputs(self, graph: GraphSpec) -> dict[str, np.ndarray]:
        outputs = {
            output.name: self._rng.integers(
                np.iinfo(output.dtype).min, np.iinfo(output.dtype).max, output.shape, output.dtype, endpoint=True
            )
            for output in graph.outputs
        }
        self._made.append(outputs)
        return outputs

    def _look(self) -> Iterator[Finding]:
        depths = {0: 0, 1: 1, 2: 1, 3: 2, 4: 3}
        length = len(self._places)
        for layer in self._spec.layers:
            span, ring = self._spec.spans[layer.layer_type], self._spec.rings[layer.layer_type]
            for kind in ("k", "v"):
                places = self._by_content(f"{kind}_new.{layer.index}")
                for row, depth in depths.items():
                    position = length + depth
                    oldest = max(0, length - ring, 0 if span is None else position - span + 1)
                    mask = f"mask.{layer.layer_type}"
                    shown = visible_rows(self._spec.tree, self._tree.feeds, f"{kind}.{layer.index}", mask, row)
                    what = f"a node at position {position}, {kind} of layer {layer.index}"
                    seen = [places.get(content) for content in shown]
                    finding = judge_rows(what, seen, min(oldest, length), length, span, WHERE)
                    if finding is not None:
                        yield finding
                        return
            yield from self._look_inside(layer.layer_type)

    def _look_at_probabilities(self, log_probs: np.ndarray) -> Iterator[Finding]:
        """log q [R, C] are the logits on their grid, less what makes exp of each row add up to 1: scores and the
        thresholds of `sled` and `synera` read them, texts and ranks show nothing of a wrong factor."""
        encoding = self._spec.tree.output("logits").encoding
        assert encoding is not None  # logits are integers on a grid
        integers = self._made[-1]["logits"][: len(log_probs)].astype(np.float64)
        logits = (integers - encoding.zero_point) * encoding.scale  # [R, C]
        wanted = logits - np.logaddexp.reduce(logits, axis=1, keepdims=True)
        off = float(np.abs(log_probs - wanted).max())
        if off > LOG_PROB_NATS:
            yield Finding("scale", WHERE, f"log q are up to {off:.2f} nats from those of the graph's logits", REPORT)

    def _by_content(self, output: str) -> Mapping[bytes, int]:
        """Position by the bytes [N, d] of a committed row."""
        return {
            self._made[number][output][:, row].tobytes(): position
            for position, (number, row) in enumerate(self._places)
        }

    def _look_inside(self, layer_type: str) -> Iterator[Finding]:
        """Rows of one pass see themselves and their ancestors (spans are longer than any path here)."""
        ring, mask = self._spec.rings[layer_type], self._tree.feeds[f"mask.{layer_type}"]
        encoding = self._spec.tree.input(f"mask.{layer_type}").encoding
        assert encoding is not None
        seen = mask[:, ring:] == encoding.quantize(np.zeros(1))[0]
        ancestors = {0: {0}, 1: {0, 1}, 2: {0, 2}, 3: {0, 1, 3}, 4: {0, 1, 3, 4}}
        for row, wanted in ancestors.items():
            found = set(np.flatnonzero(seen[row]).tolist())
            if found != wanted:
                what = f"row {row} of a pass sees rows {sorted(found)}, its ancestors are {sorted(wanted)}"
                yield Finding("positions", WHERE, what, REPORT)
                return
