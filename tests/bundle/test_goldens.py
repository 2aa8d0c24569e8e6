"""Which golden vectors a bundle has."""

from pathlib import Path

import msgspec

from hyco_export.bundle.spec import EMULATOR, INTEGER, open_bundle


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
