"""The server of the recorded conversations, asked again what it was asked."""

from pathlib import Path

import msgspec
import pytest

from hyco_export.bundle.scripted_server import ScriptedServer, read_text
from hyco_export.bundle.spec import read_bundle
from hyco_export.protocol import wire
from tests.evaluate.diagnosis.small_run import SmallRun

TEXT_TOKENS = 500


@pytest.mark.parametrize(("stop", "finished"), [(1, "stop"), (None, "length")])
def test_a_verifier_without_a_stop_token_ends_at_its_length(
    bundle_folder: Path, small_run: SmallRun, stop: int | None, finished: str
) -> None:
    bundle = read_bundle(bundle_folder)
    session = next(one for one in bundle.sessions if one.id == "before")
    bodies = [(bundle_folder / one.request).read_bytes() for one in session.exchanges]
    spec = bundle.head_spec.handoff
    text = read_text(small_run.root / "convert-head", spec, TEXT_TOKENS, frozenset(bundle.stop_ids))
    server = ScriptedServer(text, spec, stop, lambda name, body: name)
    server.prime(msgspec.msgpack.decode(bodies[0], type=wire.PrimeRequest))
    replies = [
        server.verify("golden", number, msgspec.msgpack.decode(body, type=wire.VerifyRequest))
        for number, body in enumerate(bodies[1:-1], 1)
    ]
    assert [reply.finished for reply in replies] == [""] * (len(replies) - 1) + [finished]
    last = replies[-1].tokens[-1]
    assert last == stop if stop is not None else last in text.ids
    assert replies[-1].handoff is None and all(reply.handoff is not None for reply in replies[:-1])
