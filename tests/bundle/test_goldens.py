"""Which golden vectors a bundle has."""

from pathlib import Path

import msgspec
import numpy as np

from hyco_export.bundle.spec import ALTERED, EMULATOR, INTEGER, load_arrays, open_bundle
from hyco_export.core.keepset import read_keepset


def test_golden_vectors_cover_what_they_should(bundle_folder: Path) -> None:
    bundle = open_bundle(bundle_folder)
    assert all({INTEGER, EMULATOR} == set(case.outputs) for case in bundle.cases)
    passes = [case for case in bundle.cases if case.rows is not None]
    rows = bundle.slm_spec.rows
    assert any(case.rows < rows for case in passes if case.rows is not None), "none is padded"
    rings = (bundle.head_spec.handoff.window, *bundle.slm_spec.rings.values())
    lengths = {}
    for session in bundle.sessions:
        tree = [exchange for exchange in session.exchanges if "/rounds/" in exchange.path]
        requests = [msgspec.msgpack.decode((bundle_folder / one.request).read_bytes()) for one in tree]
        lengths[session.id] = [request[1] for request in requests]
        replies = [msgspec.msgpack.decode((bundle_folder / one.reply).read_bytes()) for one in tree]
        siblings = [reply[2] for reply, request in zip(replies, requests, strict=True) if reply[2] and reply[2][0] > 0]
        assert siblings, "no verdict leaves the chain at the root"
    assert lengths["before"][0] <= min(rings)
    assert lengths["across"][0] <= max(rings) < lengths["across"][-1]
    assert lengths["after"][0] > max(rings)
    assert lengths["edges"][0] > 4000
    assert {call for session in bundle.sessions for call in session.calls} >= {case.id for case in bundle.host_cases}


def test_the_altered_session_has_what_graphs_rarely_give(bundle_folder: Path) -> None:
    bundle = open_bundle(bundle_folder)
    kept = read_keepset(bundle_folder / "tables").ids
    assert bundle.host_cases and all(set(case.outputs) == {ALTERED} for case in bundle.host_cases)
    outputs = [
        load_arrays(bundle_folder, case.outputs[ALTERED], [one.spec for one in bundle.graphs[case.graph].outputs])
        for case in bundle.host_cases
    ]
    chains = [(found["chain"], found["runner_up"]) for found in outputs if "chain" in found]
    assert any(kept[row] in bundle.stop_ids for chain, _ in chains for row in chain[:-1])
    assert all(chain[0] == runner_up[0] for chain, runner_up in chains)
    logits = [found["logits"] for found in outputs if "logits" in found]
    assert logits and all(len(np.unique(row)) < row.size for values in logits for row in values)
