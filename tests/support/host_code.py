"""What the device's host code does wrong, if anything, when it feeds the head and the SLM of any spec.

Random rows go in, the graphs' inputs are read back.

Every row is unique, so what a layer sees is told by content, whatever slot it lies in and however masks are built. The
real host classes run with a recorder in place of the graph; what is expected is computed here.

Legend: W ring slots, N kv heads, d head dim, K steps.
"""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from hyco_export.core.device_spec import GraphSpec, HeadSpec, SlmSpec, to_integers
from hyco_export.core.handoff import LAYER_TYPES, KvRows
from hyco_export.core.network.host import EmbeddingRows
from hyco_export.core.ring import rotary_tables
from hyco_export.device.head import GraphHead
from hyco_export.device.interfaces import Given
from hyco_export.device.kv_state import HeadState
from hyco_export.device.slm import GraphSlm
from hyco_export.evaluate.diagnosis.drafts import Recorder
from hyco_export.evaluate.diagnosis.finding import Finding
from hyco_export.protocol import wire


def visible_rows(graph: GraphSpec, feeds: Mapping[str, np.ndarray], ring: str, mask: str, row: int) -> list[bytes]:
    """Bytes of the ring rows that row `row` of a pass may see; `ring` names an input [N, W, d], `mask` one [R, ...]."""
    encoding = graph.input(mask).encoding
    assert encoding is not None  # masks are real numbers on a grid
    shown = encoding.quantize(np.zeros(1))[0]
    slots = np.flatnonzero(feeds[mask][row][: feeds[ring].shape[1]] == shown)
    return [feeds[ring][:, slot].tobytes() for slot in slots]


HEAD_CODE = "the device's host code of the head"
REPORT = "compare with device/ and protocol/"
ROWS_PER_ROUND = 3
BEYOND = 7  # roots behind the last edge
SEED = 20261011
SHIFTS = (-2, -1, 1, 2)


def head_host_findings(spec: HeadSpec, kept_ids: np.ndarray) -> list[Finding]:
    """Masks, rows, positions and ids of the head on the device, at every edge of ring and span."""
    span = spec.spans["sliding"] or spec.handoff.window
    edges = [edge + offset for edge in (span, spec.handoff.window) for offset in (-2, -1, 0, 1)]
    roots = sorted({root for root in (2, *edges, max(edges) + BEYOND) if root > 1})
    findings: list[Finding] = []
    for first in (roots[0], roots[-1]):  # filled round by round, and by one reply
        findings += _HeadTrial(spec, kept_ids).run(first, [root for root in roots if root >= first])
        if findings:
            break
    return findings


class _HeadTrial:
    """One life of a ring."""

    def __init__(self, spec: HeadSpec, kept_ids: np.ndarray) -> None:
        self._spec = spec
        self._kept_ids = kept_ids
        self._rng = np.random.default_rng(SEED)
        self._recorder = Recorder(self._outputs)
        self._state = HeadState(GraphHead(spec, kept_ids, self._recorder), spec.handoff)
        self._rows: dict[str, list[np.ndarray]] = {}  # by graph input, [N, d] of every position
        self._newest: tuple[bytes, bytes] = (b"", b"")

    def run(self, first: int, roots: Sequence[int]) -> list[Finding]:
        """Prime at `first`, go on by rounds, look at the feeds at `roots`."""
        position, findings = first, []
        self._state.begin(range(first + 1), Given(self._handoff(0, first)))
        while True:
            if position in roots:
                findings += list(self._look(position))
            nearest = min((root for root in roots if root > position), default=None)
            if nearest is None or findings:
                return findings
            step = min(ROWS_PER_ROUND, nearest - position)
            self._state.observe(range(position + step + 1), Given(self._handoff(position, step)))
            position += step

    def _outputs(self, _: object) -> dict[str, np.ndarray]:
        """Rows 0, 1, 2, ... of the keep set."""
        return {spec.name: np.arange(spec.shape[0], dtype=np.int32) for spec in self._spec.graph.outputs}

    def _handoff(self, start: int, count: int) -> wire.Handoff:
        """Random rows of positions start ..., the newest W of them."""
        layout = self._spec.handoff
        first = max(start, start + count - layout.window)
        kept: dict[str, dict[str, np.ndarray]] = {"k": {}, "v": {}}
        for layer_type in LAYER_TYPES:
            shape = layout.kv[layer_type]
            for kind, store in kept.items():
                rows = self._rng.integers(0, 256, (count, shape.heads, shape.dim), np.uint8)
                self._rows.setdefault(f"{kind}.{layer_type}", []).extend(rows)
                store[layer_type] = rows[first - start :]
        self._newest = (self._rng.bytes(layout.hidden), self._rng.bytes(layout.hidden))
        return wire.Handoff(*self._newest, layout.pack_rows(KvRows(kept["k"], kept["v"])), first)

    def _look(self, root: int) -> Iterator[Finding]:
        draft = self._state.draft()
        feeds, spec = self._recorder.feeds, self._spec
        if feeds["e"].tobytes() != self._newest[0] or feeds["h"].tobytes() != self._newest[1]:
            yield Finding("hand-off", HEAD_CODE, f"e or h of root {root} is not what arrived", REPORT)
        wanted_ids = tuple(self._kept_ids[: spec.steps].tolist())
        if draft.chain != wanted_ids:
            yield Finding(
                "keep set", HEAD_CODE, f"kept rows 0, 1, ... become ids {draft.chain}, not {wanted_ids}", REPORT
            )
        for layer_type in LAYER_TYPES:
            yield from self._look_at_layer(layer_type, root)

    def _look_at_layer(self, layer_type: str, root: int) -> Iterator[Finding]:
        feeds, spec = self._recorder.feeds, self._spec
        span = spec.spans[layer_type]
        oldest = max(0, root - spec.handoff.window, 0 if span is None else root - span + 1)
        for kind in ("k", "v"):
            name = f"{kind}.{layer_type}"
            place = {rows.tobytes(): position for position, rows in enumerate(self._rows[name])}
            shown = visible_rows(spec.graph, feeds, name, f"mask.{layer_type}", 0)
            finding = judge_rows(
                f"root {root}, {name}", [place.get(row) for row in shown], oldest, root, span, HEAD_CODE
            )
            if finding is not None:
                yield finding
                return
        yield from self._look_at_rotary(layer_type, root)

    def _look_at_rotary(self, layer_type: str, root: int) -> Iterator[Finding]:
        feeds, inputs = self._recorder.feeds, self._spec.graph.inputs
        names = (f"cos.{layer_type}", f"sin.{layer_type}")

        def fits(position: int) -> bool:
            tables = rotary_tables(np.array([position]), self._spec.inv_freq[layer_type])
            wanted = to_integers(
                [tensor for tensor in inputs if tensor.name in names], dict(zip(names, tables, strict=True))
            )
            return all(np.array_equal(feeds[name], wanted[name]) for name in names)

        if not fits(root):
            other = next((shift for shift in SHIFTS if fits(root + shift)), None)
            what = "another position" if other is None else f"position {root + other}"
            yield Finding("positions", HEAD_CODE, f"root {root} is rotated as {what}", REPORT)


def judge_rows(
    what: str, seen: Sequence[int | None], oldest: int, end: int, span: int | None, where: str
) -> Finding | None:
    """Positions that a row sees (None: of no row that was ever sent) against oldest .. end - 1.

    Too many or too few old ones at the end of a span or ring: the window. Anything else: rows at wrong places.
    """
    wanted = list(range(oldest, end))
    known = sorted(position for position in seen if position is not None)
    if len(known) == len(seen) and known == wanted:
        return None
    whole = len(known) == len(seen) and known == list(range(end - len(known), end))
    if whole and span is not None:
        return Finding(
            "sliding window", where, f"{what} sees {len(known)} positions, it must see {len(wanted)}", REPORT
        )
    ends = f"{known[0]} .. {known[-1]}" if known else "nothing"
    stray = "" if len(known) == len(seen) else f" and {len(seen) - len(known)} rows that nobody sent"
    return Finding("K/V rows", where, f"{what} sees positions {ends}{stray}, it must see {oldest} .. {end - 1}", REPORT)


# The SLM: the same over passes of trees and rings.

SLM_CODE = "the device's host code of the SLM"
PARENTS = (-1, 0, 0, 1, 3)  # a forest whose rows are no chain: row 4's path is 0, 1, 3
PATH = (0, 1, 3)
LOG_PROB_NATS = 1e-2  # float32 beside float64, for logits of a few thousand at most


def slm_host_findings(spec: SlmSpec, embeddings: EmbeddingRows) -> list[Finding]:
    """What tree passes see behind contexts that end at every edge of span and rings."""
    span = spec.spans["sliding"] or spec.rings["sliding"]
    edges = sorted({edge + offset for edge in (span, *spec.rings.values()) for offset in (-1, 0, 1)})
    findings: list[Finding] = []
    for context in (1, *(edge - 1 for edge in edges if edge > 2), edges[-1] + spec.rows):
        findings += list(_SlmTrial(spec, embeddings).run(context))
        if findings:
            break
    return findings


class _SlmTrial:
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
                    finding = judge_rows(what, seen, min(oldest, length), length, span, SLM_CODE)
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
            yield Finding("scale", SLM_CODE, f"log q are up to {off:.2f} nats from those of the graph's logits", REPORT)

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
                yield Finding("positions", SLM_CODE, what, REPORT)
                return
