"""A toy engine behind the guarded application, for every test of who may call."""

import msgspec

from hyco_export.protocol import wire
from hyco_export.server.admission import Facts, Limits
from hyco_export.server.engine import Engine
from tests.support.scripted import STOP_ID, VOCAB_SIZE, WINDOW, ScriptedSession, ToyLanguageModel

HEAD = "head-artifact-key"
ALICE, BOB = "alice-0123456789abcdef", "bob-0123456789abcdefgh"
MODEL = ToyLanguageModel(stop_bias=-99.0)
FACTS = Facts(VOCAB_SIZE, frozenset({STOP_ID}), 4096, HEAD, WINDOW, 4)
LIMITS = Limits(sessions=8, node_limit=32, prompt_limit=100)
PROMPT = [5, 6, 7, 8]
PRIME = wire.PrimeRequest(wire.PROTOCOL_VERSION, PROMPT, wire.Sampling(0.0, 0, 1.0), wire.EXACT, 7, 50, "device", 0, "")
INFO = wire.ServerInfo(
    1, "test", "v", "t", VOCAB_SIZE, [STOP_ID], HEAD, "k", 32, 100, 4, ["exact", "epsilon"], "thread-cpu"
)


def toy_engine() -> Engine:
    return Engine(lambda: ScriptedSession(MODEL), FACTS, LIMITS)


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


def first_round(reply: wire.PrimeReply, **changes: object) -> bytes:
    ids = [*PROMPT, reply.root]
    body = wire.VerifyRequest(wire.PROTOCOL_VERSION, len(ids), wire.committed_digest(ids), [], [])
    return wire.encode(msgspec.structs.replace(body, **changes))
