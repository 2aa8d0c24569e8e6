"""The device feeds what calibration's real-number hosts feed, on the graphs' grids: one meaning of every input."""

from types import SimpleNamespace

import msgspec
import numpy as np
import pytest

from hyco_export.core.device_spec import GraphSpec, SlmSpec, to_integers, to_real
from hyco_export.core.encodings import symmetric_encoding
from hyco_export.core.handoff import LAYER_TYPES, KvRows
from hyco_export.core.network.host import SlmHost, draft_feeds, ring_positions
from hyco_export.core.network.slm import SlmLayer, SlmNetwork
from hyco_export.device.head import GraphHead
from hyco_export.device.slm import GraphSlm
from hyco_export.protocol.tree import ROOT
from tests.support.scripted import HANDOFF, HIDDEN
from tests.support.toy_graphs import KEEP_IDS, MASK_VALUE, ToyEmbeddings, toy_head_spec, toy_slm_spec

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


def assert_equal_feeds(
    found: dict[str, np.ndarray], graph: GraphSpec, real: dict[str, np.ndarray], rows: int = 1
) -> None:
    """Equal integers; of masks the first `rows` rows, since what padding sees is each host's own affair."""
    expected = to_integers(graph.inputs, real)
    assert set(found) == set(expected)
    for name, values in expected.items():
        used = slice(rows) if name.startswith("mask") else slice(None)
        assert np.array_equal(found[name][used], values[used]), name


@pytest.mark.parametrize("root", [1, 7, 8, 9, 10, 11, 23])
@pytest.mark.parametrize("sliding_span", [4, 9, 10, 12])
def test_head_feeds(root: int, sliding_span: int) -> None:
    spec = toy_head_spec(WINDOW, {"sliding": sliding_span, "full": None})
    generator = np.random.default_rng(root)
    shapes: dict[str, tuple[int, ...]] = {"e": (root + 1, HIDDEN), "h": (root + 1, HIDDEN)}
    shapes |= {f"{kind}.{layer_type}": (root, 1, 2) for kind in "kv" for layer_type in LAYER_TYPES}
    integers = {name: generator.integers(0, 256, shape).astype(np.uint8) for name, shape in shapes.items()}
    recorded = {name: values.astype(np.float32) for name, values in integers.items()}  # grids of scale 1, zero point 0

    session = Recorder(spec.graph)
    head = GraphHead(spec, KEEP_IDS, session)
    for position in range(root):
        place = slice(position, position + 1)
        k, v = ({t: integers[f"{kind}.{t}"][place] for t in LAYER_TYPES} for kind in "kv")
        head.commit(KvRows(k, v), position)
    head.draft(integers["e"][root], integers["h"][root - 1], root)

    architecture = SimpleNamespace(inv_freq=spec.inv_freq, spans=spec.spans)
    network = SimpleNamespace(architecture=architecture, window=WINDOW)
    real = draft_feeds(network, recorded, np.array([root]), ring_positions(root, WINDOW), MASK_VALUE)  # type: ignore[arg-type]
    expected = {spec.name: real[spec.name] for spec in spec.graph.inputs}
    assert_equal_feeds(session.feeds, graph_with_grids(spec.graph), expected)


def graph_with_grids(graph: GraphSpec) -> GraphSpec:
    """e and h get the hand-off's grids: the graph's own inputs are plain integers here."""
    inputs = tuple(
        msgspec.structs.replace(spec, encoding=HANDOFF.encodings[spec.name]) if spec.name in ("e", "h") else spec
        for spec in graph.inputs
    )
    return msgspec.structs.replace(graph, inputs=inputs)


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


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("start", [0, 17])
@pytest.mark.parametrize("length", [0, 3, 6, 7, 8, 20])
def test_slm_feeds(start: int, length: int, wide: bool) -> None:
    rings, spans = {"sliding": 7, "full": 12}, {"sliding": 5, "full": None}
    spec = toy_slm_spec(6, 4, rings, spans)
    spec = with_wide_rings(spec) if wide else spec
    network = SlmNetwork(
        2, 1, 1e-6, None, rings, spans, spec.inv_freq,
        tuple(SlmLayer(layer.index, layer.layer_type, 1, 1, 2, layer.index, False, 1.0) for layer in spec.layers),
    )  # fmt: skip
    tree, prefill = Recorder(spec.tree), Recorder(spec.prefill)
    slm = GraphSlm(spec, ToyEmbeddings(), tree, prefill)
    slm.reset(start)
    real_tree = SlmHost(network, ToyEmbeddings(), spec.rows, MASK_VALUE, start)
    real_prefill = SlmHost(network, ToyEmbeddings(), spec.prefill_rows, MASK_VALUE, start)

    generator = np.random.default_rng(length)
    ids = generator.integers(0, 16, length)
    for chunk in np.split(ids, range(4, length, 4)):
        if not len(chunk):
            continue
        expected = real_prefill.feeds(chunk, range(ROOT, ROOT + len(chunk)))
        slm.prefill(chunk)
        assert_equal_feeds(prefill.feeds, spec.prefill, expected, len(chunk))
        outputs = to_real(spec.prefill.outputs, prefill.outputs)
        for host in (real_prefill, real_tree):
            host.commit(outputs, range(len(chunk)))
    for forest, path in (([ROOT, 0, 0, ROOT, 3, 4], [3, 4, 5]), ([ROOT, 0, 1], [0]), ([ROOT], [0])):
        tokens = generator.integers(0, 16, len(forest))
        expected = real_tree.feeds(tokens, forest)
        first = slm.next_row
        slm.tree_pass(tokens, np.array(forest))
        assert_equal_feeds(tree.feeds, spec.tree, expected, len(forest))
        slm.commit(first + np.array(path))
        real_tree.commit(to_real(spec.tree.outputs, tree.outputs), path)
