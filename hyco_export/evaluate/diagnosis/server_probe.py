"""The server probe: drives a server over the golden sessions, keeps its hand-offs, and compares its own head's chains.

A round sends the text's next K tokens, each beside a token that is not the text's: a server that mistakes a row for a
depth, or commits the wrong rows, shows it in the next hand-off.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from hyco_export.core.golden import Golden, GoldenSession, accepted_length
from hyco_export.core.handoff import HandoffSpec, KvRows
from hyco_export.device.interfaces import Transport
from hyco_export.errors import ProtocolError
from hyco_export.evaluate.diagnosis.finding import Finding
from hyco_export.evaluate.runs import GREEDY
from hyco_export.protocol import wire
from hyco_export.protocol.tree import ROOT

SEED = 0  # greedy decoding draws nothing

Call = Literal["PRIME", "a verify round"]
PRIME: Call = "PRIME"
ROUND: Call = "a verify round"


@dataclass(frozen=True)
class Seen:
    """One hand-off. `root_is_texts`: the server's root is the text's token there, so that e belongs to it."""

    text: int
    call: Call
    root: int  # position
    handoff: wire.Handoff
    rows: KvRows
    root_is_texts: bool


@dataclass
class Probed:
    """Results of all sessions."""

    seen: list[Seen] = field(default_factory=list)
    departures: list[str] = field(default_factory=list)  # where the server's greedy text left the golden one
    malformed: list[str] = field(default_factory=list)  # refusals, and hand-offs that are not what the protocol says


def probe(
    golden: Golden, texts: Sequence[Sequence[int]], transport: Transport, spec: HandoffSpec, head_digest: str
) -> Probed:
    """All golden sessions in order; `texts` are the ids of each golden text.

    Raises:
        ServerError: the server cannot be reached.
    """
    probed = Probed()
    for session in golden.sessions:
        try:
            _session(session, texts[session.text], golden.steps, transport, spec, head_digest, probed)
        except ProtocolError as refusal:
            probed.malformed.append(f"a call was refused ({refusal.code}): {refusal.message}")
    return probed


def _session(
    session: GoldenSession,
    ids: Sequence[int],
    steps: int,
    transport: Transport,
    spec: HandoffSpec,
    head_digest: str,
    probed: Probed,
) -> None:
    """PRIME before the first root, then a round to each further root, until the server leaves the text."""
    positions = [root.position for root in session.roots]
    start = positions[0]
    tokens = positions[-1] - start + steps + 2  # more than will be asked for: no round ends at the cap
    primed = transport.prime(_prime_request(ids[:start], tokens, head_digest))
    try:
        if not _take(probed, session.text, PRIME, start, primed.handoff, spec, primed.root == ids[start]):
            return
        for number, root in enumerate(positions[1:], 1):
            path = list(ids[root - steps : root])
            request = _round_request(ids[: root - steps], path)
            reply = transport.verify(primed.session, number, request)
            on_text = reply.tokens == list(ids[root - steps : root + 1])
            if len(reply.tokens) != steps + 1 or reply.tokens[:-1] != path:
                probed.departures.append(f"text {session.text}, after position {root - steps - 1}")
                return
            if not _take(probed, session.text, ROUND, root, reply.handoff, spec, on_text):
                return
    finally:
        transport.close_session(primed.session)


def _take(
    probed: Probed, text: int, call: Call, root: int, handoff: wire.Handoff | None, spec: HandoffSpec, on_text: bool
) -> bool:
    """Keep a hand-off; can the session go on?"""
    if not on_text:
        probed.departures.append(f"text {text}, position {root}")
    if handoff is None:
        probed.malformed.append(f"{call} at position {root} brought none")
        return False
    try:
        rows = spec.unpack_rows(handoff.kv)
    except ValueError as error:
        probed.malformed.append(f"{call} at position {root}: {error}")
        return False
    if len(handoff.e) != spec.hidden or len(handoff.h) != spec.hidden:
        probed.malformed.append(
            f"{call} at position {root}: e of {len(handoff.e)} B, h of {len(handoff.h)} B, not {spec.hidden} B each"
        )
        return False
    if handoff.first_position + rows.count != root:
        last = handoff.first_position + rows.count - 1
        probed.malformed.append(f"{call} at position {root}: rows end at position {last}, not right before the root")
    probed.seen.append(Seen(text, call, root, handoff, rows, on_text))
    return on_text


def _prime_request(prefix: Sequence[int], tokens: int, head_digest: str) -> wire.PrimeRequest:
    return wire.PrimeRequest(
        version=wire.PROTOCOL_VERSION,
        prompt=list(prefix),
        sampling=GREEDY,
        acceptance=wire.EXACT,
        seed=SEED,
        max_new_tokens=tokens,
        draft_side="device",
        draft_steps=0,
        head_digest=head_digest,
    )


def _round_request(committed: Sequence[int], path: Sequence[int]) -> wire.VerifyRequest:
    """A tree with two children at every depth, the text's token second; only it has children."""
    tokens: list[int] = []
    parents: list[int] = []
    parent = ROOT
    for token in path:
        tokens += [token - 1 if token else token + 1, token]
        parents += [parent, parent]
        parent = len(tokens) - 1
    return wire.VerifyRequest(
        version=wire.PROTOCOL_VERSION,
        length=len(committed),
        digest=wire.committed_digest(committed),
        tokens=tokens,
        parents=parents,
    )


LEAST_SHARE = 0.6  # of the expected tokens, which are the same draws: another precision moves a near-tie here and there
LEAST_EQUAL = 0.75  # of compared tokens, for the same reason
FEWEST_WRONG = 3  # chains: fewer may be near-ties


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
