"""Graphs of the device that can be read back: fake sessions that decode all they are fed, and draft by the toy model.

K/V bytes say (token, position): a session lists what each row of a pass can see, in order of position, from masks and
rings alone. A wrong slot, mask, position, parent or byte changes that list.

Legend: R rows, W ring slots, H hidden, C kept tokens.
"""

from collections.abc import Mapping

import numpy as np

from hyco_export.core.device_spec import GraphSpec, HeadSpec, KvLayer, SlmSpec, TensorSpec
from hyco_export.core.encodings import Encoding, encoding_from_range
from hyco_export.core.handoff import LAYER_TYPES, KvShape
from tests.support.scripted import HANDOFF, HIDDEN, VOCAB_SIZE, ToyLanguageModel, toy_e

MASK_VALUE = -100.0
MASK = encoding_from_range(MASK_VALUE, 0.0, "uint16")
ROTARY = encoding_from_range(-1.0, 1.0, "uint16")
EMBEDS = encoding_from_range(-4.0, 30.0, "uint16")
LOGITS = encoding_from_range(-12.0, 12.0, "uint16")
RING_ZERO = 7  # zero point of the SLM's rings: what an empty slot must hold
RING = Encoding("uint8", 1.0, RING_ZERO)
INV_FREQ = (0.004,)  # one rotating pair: a position up to 700 can be read from its angle
KEEP_IDS = np.array([token for token in range(VOCAB_SIZE) if token not in (3, 8)], np.int32)
TABLE_OFFSET = 100.0  # per-layer rows are told from token rows by it


def toy_head_spec(window: int, spans: dict[str, int | None]) -> HeadSpec:
    """A head of 4 steps and 2 runner-ups over a ring of `window`."""
    inputs = [TensorSpec("e", (1, HIDDEN), "uint8"), TensorSpec("h", (1, HIDDEN), "uint8")]
    for layer_type in LAYER_TYPES:
        inputs += [TensorSpec(f"{kind}.{layer_type}", (1, 2), "uint16", ROTARY) for kind in ("cos", "sin")]
        for kind in ("k", "v"):
            name = f"{kind}.{layer_type}"
            inputs.append(TensorSpec(name, (1, window, 2), "uint8", HANDOFF.encodings[name]))
        inputs.append(TensorSpec(f"mask.{layer_type}", (1, window), "uint16", MASK))
    outputs = (TensorSpec("chain", (4,), "int32"), TensorSpec("runner_up", (2,), "int32"))
    return HeadSpec(
        4, 2, VOCAB_SIZE, "keep", "verifier", HANDOFF, spans, dict.fromkeys(LAYER_TYPES, INV_FREQ), MASK_VALUE,
        GraphSpec("head", tuple(inputs), outputs),
    )  # fmt: skip


def read_position(feeds: Mapping[str, np.ndarray], layer_type: str, row: int) -> int:
    """The position whose rotary tables a row was given; the sign of rotate-half must be in the first half of sin."""
    cos, sin = (ROTARY.dequantize(feeds[f"{kind}.{layer_type}"][row]) for kind in ("cos", "sin"))
    assert cos[0] == cos[1] and abs(sin[0] + sin[1]) < 1e-4
    return round(float(np.arctan2(sin[1], cos[1])) / INV_FREQ[0])


def read_mask(mask: np.ndarray) -> np.ndarray:
    """bool, True where visible; nothing but the two ends of the grid may occur."""
    zero, hidden = MASK.quantize(np.array([0.0, MASK_VALUE]))
    assert np.isin(mask, [zero, hidden]).all()
    return mask == zero


class ToyHeadGraph:
    """Runs `toy_head_spec`: lists what the root sees, and drafts what the toy model says after the full layer's view.

    Attributes:
        seen: by layer type, (position mod 256, token) of the visible slots of the last run, oldest first.
        root: token and position of the last run's root.
    """

    def __init__(self, model: ToyLanguageModel, spec: HeadSpec) -> None:
        self._model = model
        self._spec = spec
        self.seen: dict[str, list[tuple[int, int]]] = {}
        self.root = (0, 0)
        self.h = np.zeros(0, np.uint8)
        self.closed = False

    def run(self, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        check_feeds(self._spec.graph, feeds)
        for place, layer_type in enumerate(LAYER_TYPES):
            k, v = feeds[f"k.{layer_type}"][0], feeds[f"v.{layer_type}"][0]  # [W, 2]
            visible = read_mask(feeds[f"mask.{layer_type}"][0])
            assert np.array_equal(v[visible], k[visible] + 1)
            entries = [(int(row[1]) - 2 * place, int(row[0]) - 2 * place) for row in k[visible]]
            self.seen[layer_type] = sorted(entries)
        positions = {read_position(feeds, layer_type, 0) for layer_type in LAYER_TYPES}
        assert len(positions) == 1
        root = int(feeds["e"][0, 0])
        assert np.array_equal(feeds["e"][0], toy_e(root))
        self.root, self.h = (root, positions.pop()), feeds["h"][0]
        context = [token for _, token in self.seen["full"]] + [root]
        chain = self._model.greedy(context, self._spec.steps)
        kept = np.searchsorted(KEEP_IDS, chain)
        kept = np.minimum(kept, len(KEEP_IDS) - 1)  # a token outside the keep set: the next kept one, a wrong draft
        return {"chain": kept.astype(np.int32), "runner_up": ((kept[:2] + 1) % len(KEEP_IDS)).astype(np.int32)}

    def close(self) -> None:
        self.closed = True


def check_feeds(graph: GraphSpec, feeds: Mapping[str, np.ndarray]) -> None:
    """Exactly the graph's inputs, in their shapes and dtypes."""
    assert set(feeds) == {spec.name for spec in graph.inputs}
    for spec in graph.inputs:
        assert feeds[spec.name].shape == spec.shape, spec.name
        assert feeds[spec.name].dtype == spec.dtype, spec.name


class ToyEmbeddings:
    """Row of token t: (t, 1); its per-layer row: (100 + t,)."""

    def tokens(self, ids: np.ndarray) -> np.ndarray:
        return np.stack([ids, np.ones(len(ids))], axis=1).astype(np.float32)

    def per_layer(self, ids: np.ndarray) -> np.ndarray:
        return (TABLE_OFFSET + ids[:, None]).astype(np.float32)


def toy_slm_spec(rows: int, prefill_rows: int, rings: dict[str, int], spans: dict[str, int | None]) -> SlmSpec:
    """An SLM with a sliding layer 0 and a full layer 2 that store K/V; its prefill graph does not read layer 2's."""
    layers = (KvLayer(0, "sliding", KvShape(1, 2)), KvLayer(2, "full", KvShape(1, 2)))
    per_layer = encoding_from_range(TABLE_OFFSET, TABLE_OFFSET + VOCAB_SIZE, "uint16")

    def graph(name: str, count: int, read: tuple[KvLayer, ...]) -> GraphSpec:
        inputs = [TensorSpec("embeds", (count, 2), "uint16", EMBEDS)]
        inputs.append(TensorSpec("per_layer", (count, 1), "uint16", per_layer))
        for layer in read:
            layer_type, capacity = layer.layer_type, rings[layer.layer_type]
            inputs += [TensorSpec(f"{kind}.{layer.index}", (1, capacity, 2), "uint8", RING) for kind in ("k", "v")]
            inputs.append(TensorSpec(f"mask.{layer_type}", (count, capacity + count), "uint16", MASK))
        for layer in layers:
            inputs += [TensorSpec(f"{k}.{layer.layer_type}", (count, 2), "uint16", ROTARY) for k in ("cos", "sin")]
        outputs = [
            TensorSpec(f"{kind}_new.{layer.index}", (1, count, 2), "uint8", RING)
            for layer in layers
            for kind in ("k", "v")
        ]
        if read == layers:
            outputs.append(TensorSpec("logits", (count, len(KEEP_IDS)), "uint16", LOGITS))
        return GraphSpec(name, tuple(inputs), tuple(outputs))

    tree, prefill = graph("slm_tree", rows, layers), graph("slm_prefill", prefill_rows, layers[:1])
    return SlmSpec(
        rows, prefill_rows, VOCAB_SIZE, "keep", 2, 1, rings, spans, dict.fromkeys(rings, INV_FREQ), layers, MASK_VALUE,
        tree, prefill,
    )  # fmt: skip


class ToySlmGraph:
    """Runs one of the two graphs of `toy_slm_spec`.

    Attributes:
        seen: by layer type and row, (position mod 256, token) of what the row sees, itself included, oldest first.
        positions: by row.
        ring: (position mod 256, token) of every slot of a layer's ring, None where it holds 0.0.
    """

    def __init__(self, model: ToyLanguageModel, spec: SlmSpec, graph: GraphSpec) -> None:
        self._model = model
        self._spec = spec
        self._graph = graph
        self.runs = 0
        self.seen: dict[str, list[list[tuple[int, int]]]] = {}
        self.positions: list[int] = []
        self.ring: dict[str, list[tuple[int, int] | None]] = {}
        self.closed = False

    def run(self, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        check_feeds(self._graph, feeds)
        self.runs += 1
        count = len(feeds["embeds"])
        tokens = np.rint(EMBEDS.dequantize(feeds["embeds"])[:, 0]).astype(int)
        scale = self._graph.input("per_layer").encoding
        assert scale is not None
        assert np.array_equal(np.rint(scale.dequantize(feeds["per_layer"])[:, 0] - TABLE_OFFSET).astype(int), tokens)
        self.positions = [read_position(feeds, "full", row) for row in range(count)]
        assert self.positions == [read_position(feeds, "sliding", row) for row in range(count)]
        new = np.array([[token, position % 256] for token, position in zip(tokens, self.positions, strict=True)])
        outputs: dict[str, np.ndarray] = {}
        for layer in self._spec.layers:
            block = (new + RING_ZERO + 1 + layer.index).astype(np.uint8)[None]  # [1, R, 2], never the zero point
            outputs[f"k_new.{layer.index}"], outputs[f"v_new.{layer.index}"] = block, (block + 1).astype(np.uint8)
            if f"k.{layer.index}" in feeds:
                self._look(layer, feeds, new)
        if "logits" in {spec.name for spec in self._graph.outputs}:
            contexts = [[token for _, token in seen] for seen in self.seen["full"]]
            logits = np.stack([self._model.logits(context)[KEEP_IDS] for context in contexts])
            outputs["logits"] = LOGITS.quantize(logits)
        return outputs

    def _look(self, layer: KvLayer, feeds: Mapping[str, np.ndarray], new: np.ndarray) -> None:
        k, v = feeds[f"k.{layer.index}"][0], feeds[f"v.{layer.index}"][0]  # [W, 2]
        empty = (k == RING_ZERO).all(axis=1)
        assert np.array_equal(v[~empty], (k[~empty] + 1).astype(np.uint8)) and (v[empty] == RING_ZERO).all()
        held = (k - np.uint8(RING_ZERO + 1 + layer.index)).astype(np.uint8)
        entries = [(int(row[1]), int(row[0])) for row in np.concatenate([held, new.astype(np.uint8)])]
        self.ring[layer.layer_type] = [
            None if hole else entry for hole, entry in zip(empty, entries[: len(k)], strict=True)
        ]
        visible = read_mask(feeds[f"mask.{layer.layer_type}"])  # [R, W + R]
        assert not visible[:, : len(k)][:, empty].any(), "an empty slot is visible"
        self.seen[layer.layer_type] = [sorted(entries[place] for place in np.flatnonzero(row)) for row in visible]

    def close(self) -> None:
        self.closed = True
