"""What the device feeds its graphs, byte by byte, beside the same worked out position by position.

Legend: R rows, W ring slots, N kv heads, d head dim.
"""

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
import pytest

from hyco_export.core.device_spec import GraphSpec, SlmSpec
from hyco_export.core.encodings import symmetric_encoding
from hyco_export.core.handoff import LAYER_TYPES, KvRows
from hyco_export.device.head import GraphHead
from hyco_export.device.slm import GraphSlm
from hyco_export.protocol.tree import ROOT
from tests.support.scripted import HIDDEN
from tests.support.toy_graphs import (
    EMBEDS,
    INV_FREQ,
    KEEP_IDS,
    MASK,
    MASK_VALUE,
    RING_ZERO,
    ROTARY,
    TABLE_OFFSET,
    ToyEmbeddings,
    toy_head_spec,
    toy_slm_spec,
)

WINDOW = 8


class Recorder:
    """A session that keeps what it was fed and answers with seeded K/V, in the graph's encodings."""

    def __init__(self, graph: GraphSpec) -> None:
        self._graph = graph
        self._generator = np.random.default_rng(len(graph.inputs))
        self.feeds: dict[str, np.ndarray] = {}
        self.outputs: dict[str, np.ndarray] = {}

    def run(self, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        self.feeds = {name: values.copy() for name, values in feeds.items()}
        self.outputs = {
            spec.name: self._generator.integers(0, 8, spec.shape).astype(spec.dtype) for spec in self._graph.outputs
        }
        return self.outputs

    def close(self) -> None:
        pass


def ring_of(rows: Mapping[int, np.ndarray], empty: np.ndarray) -> np.ndarray:
    """A ring [N, W, d] after these rows [N, d] were written by position."""
    ring = empty.copy()
    for position in sorted(rows):
        ring[:, position % ring.shape[1]] = rows[position]
    return ring


def newest_in_slot(slot: int, capacity: int, held: range) -> int | None:
    """The position that a slot holds."""
    return max((position for position in held if position % capacity == slot), default=None)


def sees(query: int, key: int | None, span: int | None) -> bool:
    return key is not None and key <= query and (span is None or query - key < span)


def on_mask_grid(seen: Sequence[Sequence[bool]]) -> np.ndarray:
    shown, hidden = (int(MASK.quantize(np.array([value]))[0]) for value in (0.0, MASK_VALUE))
    return np.array([[shown if each else hidden for each in row] for row in seen], np.uint16)


def rotary(positions: Sequence[int], layer_type: str) -> dict[str, np.ndarray]:
    """Tables of one rotating pair; the sign of rotate-half stands in the first half of sin."""
    angles = [np.float32(position) * np.float32(INV_FREQ[0]) for position in positions]
    return {
        f"cos.{layer_type}": ROTARY.quantize(np.array([[np.cos(angle), np.cos(angle)] for angle in angles])),
        f"sin.{layer_type}": ROTARY.quantize(np.array([[-np.sin(angle), np.sin(angle)] for angle in angles])),
    }


def assert_equal_feeds(found: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray]) -> None:
    assert set(found) == set(expected)
    for name, values in expected.items():
        assert found[name].dtype == values.dtype, name
        assert np.array_equal(found[name], values), name


@pytest.mark.parametrize("root", [1, 7, 8, 9, 10, 11, 23])
@pytest.mark.parametrize("sliding_span", [4, 9, 10, 12])
def test_head_feeds(root: int, sliding_span: int) -> None:
    spans = {"sliding": sliding_span, "full": None}
    spec = toy_head_spec(WINDOW, spans)
    generator = np.random.default_rng(root)
    e, h = generator.integers(0, 256, (2, HIDDEN)).astype(np.uint8)
    rows = {
        f"{kind}.{layer_type}": generator.integers(0, 256, (root, 1, 2)).astype(np.uint8)
        for kind in "kv"
        for layer_type in LAYER_TYPES
    }
    session = Recorder(spec.graph)
    head = GraphHead(spec, KEEP_IDS, session)
    for position in range(root):
        k, v = ({t: rows[f"{kind}.{t}"][position : position + 1] for t in LAYER_TYPES} for kind in "kv")
        head.commit(KvRows(k, v), position)
    head.draft(e, h, root)

    expected = {"e": e[None], "h": h[None]}
    for name, values in rows.items():
        empty = np.full((1, WINDOW, 2), spec.graph.input(name).encoding.zero_point, np.uint8)
        expected[name] = ring_of(dict(enumerate(values)), empty)
    for layer_type, span in spans.items():
        expected |= rotary([root], layer_type)
        held = [newest_in_slot(slot, WINDOW, range(root)) for slot in range(WINDOW)]
        expected[f"mask.{layer_type}"] = on_mask_grid([[sees(root, key, span) for key in held]])
    assert_equal_feeds(session.feeds, expected)


def with_wide_rings(spec: SlmSpec) -> SlmSpec:
    """The same with K and V of 16 bits."""

    def widened(graph: GraphSpec) -> GraphSpec:
        inputs, outputs = (
            tuple(
                msgspec.structs.replace(each, dtype="uint16", encoding=symmetric_encoding(4.0, "uint16"))
                if each.name.startswith(("k", "v"))
                else each
                for each in tensors
            )
            for tensors in (graph.inputs, graph.outputs)
        )
        return msgspec.structs.replace(graph, inputs=inputs, outputs=outputs)

    return msgspec.structs.replace(spec, tree=widened(spec.tree), prefill=widened(spec.prefill))


class SlmReference:
    """What one SLM must be fed, from every row that was ever committed."""

    def __init__(self, spec: SlmSpec, start: int) -> None:
        self._spec = spec
        self._start = start
        self._tokens_seen = start  # the next position
        self._committed: dict[str, dict[int, np.ndarray]] = {
            f"{k}.{each.index}": {} for each in spec.layers for k in "kv"
        }

    def commit(self, outputs: Mapping[str, np.ndarray], rows: Sequence[int]) -> None:
        for row in rows:
            for name, by_position in self._committed.items():
                kind, _, layer = name.partition(".")
                by_position[self._tokens_seen] = outputs[f"{kind}_new.{layer}"][:, row]
            self._tokens_seen += 1

    def feeds(self, graph: GraphSpec, tokens: Sequence[int], parents: Sequence[int]) -> dict[str, np.ndarray]:
        length, count = self._tokens_seen, graph.input("embeds").shape[0]
        padding = count - len(tokens)
        ids = np.array([*tokens, *[0] * padding])
        paths: list[list[int]] = []  # each row's ancestors and itself
        for row, parent in enumerate(parents):
            paths.append([*(paths[parent] if parent != ROOT else []), row])
        paths += [[row] for row in range(len(tokens), count)]
        positions = [length + len(path) - 1 for path in paths]
        expected = {
            "embeds": EMBEDS.quantize(np.array([[token, 1.0] for token in ids])),
            "per_layer": graph.input("per_layer").encoding.quantize(TABLE_OFFSET + ids[:, None]),
        }
        for layer_type, capacity in self._spec.rings.items():
            span, held = self._spec.spans[layer_type], range(self._start, length)
            slots = [newest_in_slot(slot, capacity, held) for slot in range(capacity)]
            seen = []
            for row, (path, position) in enumerate(zip(paths, positions, strict=True)):
                in_ring = [row < len(tokens) and sees(position, key, span) for key in slots]
                seen.append(
                    [*in_ring, *(other in path and sees(position, positions[other], span) for other in range(count))]
                )
            expected |= {f"mask.{layer_type}": on_mask_grid(seen), **rotary(positions, layer_type)}
        for name, by_position in self._committed.items():
            ring = self._spec.tree.input(name)
            expected[name] = ring_of(by_position, np.full(ring.shape, ring.encoding.zero_point, ring.dtype))
        return {each.name: expected[each.name] for each in graph.inputs}


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("start", [0, 17])
@pytest.mark.parametrize("length", [0, 3, 6, 7, 8, 20])
def test_slm_feeds(start: int, length: int, wide: bool) -> None:
    spec = toy_slm_spec(6, 4, {"sliding": 7, "full": 12}, {"sliding": 5, "full": None})
    spec = with_wide_rings(spec) if wide else spec
    tree, prefill = Recorder(spec.tree), Recorder(spec.prefill)
    slm, reference = GraphSlm(spec, ToyEmbeddings(), tree, prefill), SlmReference(spec, start)
    slm.reset(start)

    generator = np.random.default_rng(length)
    ids = generator.integers(0, 16, length)
    for chunk in np.split(ids, range(4, length, 4)):
        if not len(chunk):
            continue
        expected = reference.feeds(spec.prefill, chunk, range(ROOT, ROOT + len(chunk)))
        slm.prefill(chunk)
        assert_equal_feeds(prefill.feeds, expected)
        reference.commit(prefill.outputs, range(len(chunk)))
    for forest, path in (([ROOT, 0, 0, ROOT, 3, 4], [3, 4, 5]), ([ROOT, 0, 1], [0]), ([ROOT], [0])):
        tokens = generator.integers(0, 16, len(forest))
        expected = reference.feeds(spec.tree, tokens, forest)
        first = slm.next_row
        slm.tree_pass(tokens, np.array(forest))
        assert_equal_feeds(tree.feeds, expected)
        slm.commit(first + np.array(path))
        reference.commit(tree.outputs, path)


def test_the_rings_of_a_fresh_slm_hold_zero() -> None:
    spec = toy_slm_spec(6, 4, {"sliding": 7, "full": 12}, {"sliding": 5, "full": None})
    tree = Recorder(spec.tree)
    GraphSlm(spec, ToyEmbeddings(), tree, Recorder(spec.prefill)).tree_pass(np.array([1]), np.array([ROOT]))
    assert all((tree.feeds[f"{kind}.{layer}"] == RING_ZERO).all() for kind in "kv" for layer in (0, 2))
