"""Does the device's host code feed the head what it should? Random rows go in, and the graph's inputs are read back.

Every row is unique, so what a layer sees is told by content: which slot it lies in, and how masks are built, does not
matter. Knows the real host classes and a recorder in place of the graph; what is expected is computed here.

Legend: W ring slots, N kv heads, d head dim, K steps.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from hyco_export.core.devicespec import HeadSpec
from hyco_export.core.handoff import LAYER_TYPES, KvRows
from hyco_export.core.network.boundary import to_integers
from hyco_export.core.rotary import rotary_tables
from hyco_export.evaluate.diagnosis.finding import Finding
from hyco_export.evaluate.diagnosis.recorder import Recorder, visible_rows
from hyco_export.runtime import wire
from hyco_export.runtime.devices.head import GraphHead
from hyco_export.runtime.feeds import HeadFeed
from hyco_export.runtime.ports import Given

WHERE = "the device's host code of the head"
REPORT = "report it: runtime/devices and runtime/feeds were changed, or this file"
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
        findings += _Trial(spec, kept_ids).run(first, [root for root in roots if root >= first])
        if findings:
            break
    return findings


class _Trial:
    """One life of a ring."""

    def __init__(self, spec: HeadSpec, kept_ids: np.ndarray) -> None:
        self._spec = spec
        self._kept_ids = kept_ids
        self._rng = np.random.default_rng(SEED)
        self._recorder = Recorder(self._outputs)
        self._feed = HeadFeed(GraphHead(spec, kept_ids, self._recorder), spec.handoff)
        self._rows: dict[str, list[np.ndarray]] = {}  # by graph input, [N, d] of every position
        self._newest: tuple[bytes, bytes] = (b"", b"")

    def run(self, first: int, roots: Sequence[int]) -> list[Finding]:
        """Prime at `first`, go on by rounds, look at the feeds at `roots`."""
        position, findings = first, []
        self._feed.begin(range(first + 1), Given(self._handoff(0, first)))
        while True:
            if position in roots:
                findings += list(self._look(position))
            nearest = min((root for root in roots if root > position), default=None)
            if nearest is None or findings:
                return findings
            step = min(ROWS_PER_ROUND, nearest - position)
            self._feed.observe(range(position + step + 1), Given(self._handoff(position, step)))
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
        draft = self._feed.draft()
        feeds, spec = self._recorder.feeds, self._spec
        if feeds["e"].tobytes() != self._newest[0] or feeds["h"].tobytes() != self._newest[1]:
            yield Finding("hand-off", WHERE, f"e or h of root {root} is not what arrived", REPORT)
        wanted_ids = tuple(self._kept_ids[: spec.steps].tolist())
        if draft.chain != wanted_ids:
            yield Finding("keep set", WHERE, f"kept rows 0, 1, ... become ids {draft.chain}, not {wanted_ids}", REPORT)
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
            finding = judge_rows(f"root {root}, {name}", [place.get(row) for row in shown], oldest, root, span, WHERE)
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
            yield Finding("positions", WHERE, f"root {root} is rotated as {what}", REPORT)


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
