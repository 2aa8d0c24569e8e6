"""The consumer's host code beside the device's own: two programs, the same graph inputs and trees, whatever happens.

Graphs are random numbers here: only what the hosts feed, build and keep is compared. Runs with an attention sink, SLMs
that overflow a pass and verdicts of any kind, which recorded conversations do not reach.
"""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from safetensors.numpy import save_file

from hyco_export.bundle.graphs import assemble_device
from hyco_export.bundle.spec import Bundle, read_bundle
from hyco_export.device.drafters import HybridDrafter
from hyco_export.device.interfaces import Given
from hyco_export.device.kv_state import HeadState
from hyco_export.device.tree_builder import SlmState, TreeRule
from hyco_export.protocol.tree import path_to
from hyco_export.protocol.wire import Handoff
from tests.bundle.test_consumer import load_consumer

ROUNDS = 12


class RandomGraph:
    """Outputs that depend on the number of the call alone; keeps what it was fed."""

    def __init__(self, name: str, bundle: Bundle, fed: list[tuple[str, dict[str, np.ndarray]]]) -> None:
        graph = bundle.graphs[name]
        self.inputs = {one.name: msgspec.to_builtins(one) for one in graph.inputs}
        self.outputs = {one.name: msgspec.to_builtins(one) for one in graph.outputs}
        self._name, self._fed = name, fed
        self._columns = next(one.shape[1] for one in bundle.graphs["slm_tree"].outputs if one.name == "logits")

    def run(self, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        self._fed.append((self._name, {name: np.array(values) for name, values in feeds.items()}))
        rng = np.random.default_rng(len(self._fed))
        limits = {"uint8": 256, "uint16": 65536, "int32": self._columns}
        return {
            name: rng.integers(0, limits[one["dtype"]], one["shape"]).astype(one["dtype"])
            for name, one in self.outputs.items()
        }

    def close(self) -> None:
        pass


def handoff_of(bundle: Bundle, root: int, count: int, rng: np.random.Generator) -> Handoff:
    spec = bundle.head_spec.handoff
    sizes = (spec.hidden, spec.hidden, count * spec.row_bytes)
    return Handoff(*(rng.integers(0, 256, size, dtype=np.uint8).tobytes() for size in sizes), root - count)


def with_sink(bundle_folder: Path, copy: Path, token: int) -> None:
    """The bundle with stored rows of an opening token."""
    shutil.copytree(bundle_folder, copy, ignore=shutil.ignore_patterns("golden", "integer", "*.bin"))
    facts = json.loads((copy / "bundle.json").read_bytes())
    rng, rings = (
        np.random.default_rng(9),
        [one for one in facts["graphs"]["slm_tree"]["inputs"] if one["name"][1] == "."],
    )
    rows = {one["name"]: rng.integers(0, 256, (one["shape"][0], 1, one["shape"][2]), dtype=np.uint8) for one in rings}
    save_file(rows, copy / "tables" / "slm_opening.safetensors")
    facts["slm_sink"], facts["slm"]["opening_token"] = "tables/slm_opening.safetensors", token
    (copy / "bundle.json").write_text(json.dumps(facts))


@pytest.mark.parametrize(("length", "sink"), [(1, False), (4, False), (9, True), (40, False), (90, True)])
def test_both_feed_and_build_the_same(bundle_folder: Path, tmp_path: Path, length: int, sink: bool) -> None:
    folder = bundle_folder
    rng = np.random.default_rng(length)
    bundle = read_bundle(folder)
    ids = rng.integers(10, bundle.server.vocab_size, length + 1).tolist()
    if sink:
        folder = tmp_path / "sink"
        with_sink(bundle_folder, folder, ids[0])
        bundle = read_bundle(folder)
    ours: list[tuple[str, dict[str, np.ndarray]]] = []
    theirs: list[tuple[str, dict[str, np.ndarray]]] = []
    device = assemble_device(folder, bundle, {name: RandomGraph(name, bundle, ours) for name in bundle.graphs})
    tree = bundle.drafting
    rule = TreeRule(tree.edge_log_prob, tree.budget, tree.candidates_per_row, tree.temperature)
    planter, state = HeadState(device.head, device.handoff), SlmState(device.slm, device.slm_ids, bundle.stop_ids)
    drafter = HybridDrafter(planter, state, rule)
    facts: dict[str, Any] = json.loads((folder / "bundle.json").read_bytes())
    graphs = {name: RandomGraph(name, bundle, theirs) for name in bundle.graphs}
    consumer = load_consumer().Drafter(folder, facts, graphs)

    first = handoff_of(bundle, length, min(length, bundle.head_spec.handoff.window), rng)
    drafter.begin(ids, Given(first))
    consumer.head.take(msgspec.to_builtins(first, builtin_types=(bytes,)), length, begin=True)
    consumer.slm.begin(ids)
    for _ in range(ROUNDS):
        tree = drafter.propose(ids).tree
        assert consumer.propose(ids) == (list(tree.tokens), list(tree.parents))
        path = path_to(tree.parents, int(rng.integers(-1, len(tree))))
        old_root = len(ids) - 1
        ids += [tree.tokens[row] for row in path] + [int(rng.integers(10, bundle.server.vocab_size))]
        given = handoff_of(bundle, len(ids) - 1, len(ids) - 1 - old_root, rng)
        drafter.observe(path, ids, Given(given))
        consumer.observe(list(path), len(ids) - 1, msgspec.to_builtins(given, builtin_types=(bytes,)))
    assert [name for name, _ in ours] == [name for name, _ in theirs] and len(ours) >= 2 * ROUNDS
    for (name, wanted), (_, found) in zip(ours, theirs, strict=True):
        assert set(wanted) == set(found)
        for tensor, values in wanted.items():
            slack = 1 if tensor[:4] in ("cos.", "sin.") else 0
            off = np.abs(values.astype(np.int64) - found[tensor].astype(np.int64)).max()
            assert off <= slack, f"{name}/{tensor}"
