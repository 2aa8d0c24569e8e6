"""Does the server's own head draft as the published one did? Its chains beside those of transformers' head, and how
many of its tokens the verifier takes."""

from collections.abc import Sequence

from hyco_export.core.golden import Golden, accepted_length
from hyco_export.evaluate.diagnosis.finding import Finding
from hyco_export.evaluate.diagnosis.walk import SEED
from hyco_export.evaluate.trials import GREEDY
from hyco_export.runtime import wire
from hyco_export.runtime.ports import Transport

LEAST_SHARE = 0.6  # of the expected tokens, which are the same draws: another precision moves a near-tie here and there
LEAST_EQUAL = 0.75  # of compared tokens, for the same reason
FEWEST_WRONG = 3  # chains: a near-tie or two say nothing


def server_head_findings(golden: Golden, texts: Sequence[Sequence[int]], transport: Transport) -> list[Finding]:
    """One round at the first root of every golden session, drafted on the server.

    Raises:
        ServerError, ProtocolError: the server cannot be reached, or refuses a call.
    """
    expected = sum(session.roots[0].server_accepted for session in golden.sessions)
    seen = wrong = compared = 0
    for session in golden.sessions:
        root, ids = session.roots[0], texts[session.text]
        accepted, chain = _round(ids, root.position, golden.steps, transport)
        seen += accepted
        if chain:  # of the same root
            equal = accepted_length(tuple(chain), root.server_chain)
            wrong += equal < len(chain)
            compared += min(equal + 1, len(chain))  # what follows a difference was fed another token
    text = ""
    if seen < LEAST_SHARE * expected:
        rounds = len(golden.sessions)
        text = f"the verifier takes {seen} of its tokens in {rounds} rounds, of the published head's {expected}"
    elif wrong >= FEWEST_WRONG and wrong > (1 - LEAST_EQUAL) * compared:
        text = f"{wrong} of {compared} drafted tokens are not those of transformers' head"
    if not text:
        return []
    hint = "serve with the head of $.models.head; a server that drafts cloud-mtp may have loaded another"
    return [Finding("head", "the server's own head", text, hint)]


def _round(ids: Sequence[int], root: int, steps: int, transport: Transport) -> tuple[int, list[int]]:
    """How many tokens of its chain at `root` the server takes itself, and the chain where the root is the text's."""
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
            trace=True,
        )
    )
    try:
        if primed.finished:
            return 0, []
        committed = [*ids[:root], primed.root]
        digest = wire.committed_digest(committed)
        request = wire.VerifyRequest(wire.PROTOCOL_VERSION, len(committed), digest, [], [])
        reply = transport.verify(primed.session, 1, request)
        chain = reply.evidence.tokens if reply.evidence and primed.root == ids[root] else []
        return len(reply.accepted), chain
    finally:
        transport.close_session(primed.session)
