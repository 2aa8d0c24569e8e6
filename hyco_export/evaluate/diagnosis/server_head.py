"""Does the server's own head draft as the published one did? Told from how many of its tokens the verifier takes."""

from collections.abc import Sequence

from hyco_export.core.golden import Golden
from hyco_export.evaluate.diagnosis.finding import Finding
from hyco_export.evaluate.diagnosis.walk import SEED
from hyco_export.evaluate.trials import GREEDY
from hyco_export.runtime import wire
from hyco_export.runtime.ports import Transport

LEAST_SHARE = 0.6  # of the expected tokens, which are the same draws: another precision moves a near-tie here and there


def server_head_findings(golden: Golden, texts: Sequence[Sequence[int]], transport: Transport) -> list[Finding]:
    """One round at the first root of every golden session, drafted on the server.

    Raises:
        ServerError, ProtocolError: the server cannot be reached, or refuses a call.
    """
    expected = sum(session.roots[0].server_accepted for session in golden.sessions)
    seen = sum(
        _accepted(texts[session.text], session.roots[0].position, golden.steps, transport)
        for session in golden.sessions
    )
    if seen >= LEAST_SHARE * expected:
        return []
    text = (
        f"the verifier takes {seen} of its tokens in {len(golden.sessions)} rounds, of the published head's {expected}"
    )
    hint = "serve with the head of $.models.head; a server that drafts cloud-mtp may have loaded another"
    return [Finding("head", "the server's own head", text, hint)]


def _accepted(ids: Sequence[int], root: int, steps: int, transport: Transport) -> int:
    """Tokens of the server's chain at `root` that it takes itself."""
    primed = transport.prime(
        wire.PrimeRequest(
            version=wire.PROTOCOL_VERSION,
            prompt=list(ids[:root]),
            sampling=GREEDY,
            acceptance=wire.EXACT,
            seed=SEED,
            max_new_tokens=steps + 3,  # the round does not end at the cap
            draft_side="server",
            draft_steps=steps,
            head_digest="",
        )
    )
    try:
        if primed.finished:
            return 0
        committed = [*ids[:root], primed.root]
        digest = wire.committed_digest(committed)
        request = wire.VerifyRequest(wire.PROTOCOL_VERSION, len(committed), digest, [], [])
        return len(transport.verify(primed.session, 1, request).accepted)
    finally:
        transport.close_session(primed.session)
