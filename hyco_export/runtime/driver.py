"""The device's loop: prime, draft, verify, commit, until the server says it is finished. Records every step.

Knows the wire's calls and the drafter's three methods; no models, no HTTP, no scoring. Committed tokens are the
device's: when the server has lost a session they are all sent again, and generation goes on behind them.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress

import msgspec

from hyco_export.errors import ProtocolError, ServerError
from hyco_export.runtime import wire
from hyco_export.runtime.drafters import Draft, Drafter
from hyco_export.runtime.ports import Given, Transport
from hyco_export.runtime.trace import GenerationTrace, PrimeTrace, RoundTrace
from hyco_export.runtime.tree import ROOT

Clock = Callable[[], float]  # seconds


class Request(msgspec.Struct, frozen=True):
    """What a generation asks of the server; `system`, `prompt_id` and `stop_ids` only stand in the trace."""

    system: str
    prompt_id: str
    sampling: wire.Sampling
    acceptance: wire.Acceptance
    seed: int
    max_new_tokens: int
    draft_side: wire.DraftSide = "device"
    draft_steps: int = 0
    head_digest: str = ""
    trace: bool = False  # ask for what each round was judged by
    stop_ids: tuple[int, ...] = ()


class Proposal(msgspec.Struct, frozen=True):
    """A draft on its way: it is sent again as it is until its verdict is there."""

    draft: Draft
    start_ms: float
    draft_ms: float


def generate(
    prompt_ids: Sequence[int],
    request: Request,
    drafter: Drafter,
    transport: Transport,
    clock: Clock = time.perf_counter,
) -> GenerationTrace:
    """Generate after `prompt_ids` until a stop id or the token cap.

    A session that the server no longer knows is primed again with every committed id; no committed token changes.

    Raises:
        ServerError: the server cannot be reached, retries included.
        ProtocolError: a refusal that cannot be mended, or a reply that does not fit what was sent.
    """
    generation = Generation(prompt_ids, request, drafter, transport, clock)
    try:
        while not generation.finished:
            generation.step()
    finally:
        generation.close()
    return generation.trace()


class Generation:
    """State of one generation: committed ids, the session and its round number, and the records so far.

    `finished` is "" while there is more to come, then "stop" or "length".
    """

    def __init__(
        self,
        prompt_ids: Sequence[int],
        request: Request,
        drafter: Drafter,
        transport: Transport,
        clock: Clock = time.perf_counter,
    ) -> None:
        self._ids = list(prompt_ids)
        self._prompt_length = len(prompt_ids)
        self._request = request
        self._drafter = drafter
        self._transport = transport
        self._clock = clock
        self._started = clock()
        self._session = ""
        self._round_number = 0
        self._pending: Proposal | None = None
        self._primes: list[PrimeTrace] = []
        self._rounds: list[RoundTrace] = []
        self._first_token_ms = 0.0
        self._last_token_ms = 0.0
        self.finished = ""

    @property
    def ids(self) -> tuple[int, ...]:
        """All committed ids, the prompt's first."""
        return tuple(self._ids)

    def step(self) -> None:
        """One call: a round, or PRIME where there is no session yet or the server has lost it.

        Raises:
            ServerError: no answer; the same step may be taken again, a round's verdict waits on the server.
            ProtocolError: a refusal that cannot be mended, or a reply that does not fit what was sent.
        """
        if not self._session:
            self._prime()
            return
        try:
            self._round()
        except ProtocolError as refusal:
            if refusal.code != wire.UNKNOWN_SESSION:
                raise
            self._session = ""

    def _prime(self) -> None:
        """Open a session on all committed ids; commits the token that the server draws."""
        start_ms = self._now_ms()
        sent = len(self._ids)
        reply = self._transport.prime(self._prime_request())
        wait_ms = self._now_ms() - start_ms
        traffic = self._transport.traffic
        self._session, self._round_number, self._pending = reply.session, 0, None
        if reply.length != sent + 1:
            raise ProtocolError("length_mismatch", f"{reply.length} ids after priming with {sent}, expected one more")
        self._take((reply.root,), reply.finished)
        prefill_start_ms = self._now_ms()
        if not self.finished:
            self._drafter.begin(self._ids, Given(reply.handoff))
        self._primes.append(
            PrimeTrace(
                start_ms=start_ms,
                prompt_length=sent,
                continue_from=sent - self._prompt_length,
                root=reply.root,
                finished=reply.finished,
                wait_ms=wait_ms,
                prefill_ms=self._now_ms() - prefill_start_ms,
                server_ms=reply.server_ms,
                traffic=traffic,
            )
        )

    def _prime_request(self) -> wire.PrimeRequest:
        request = self._request
        return wire.PrimeRequest(
            version=wire.PROTOCOL_VERSION,
            prompt=list(self._ids),
            sampling=request.sampling,
            acceptance=request.acceptance,
            seed=request.seed,
            max_new_tokens=request.max_new_tokens,
            draft_side=request.draft_side,
            draft_steps=request.draft_steps,
            head_digest=request.head_digest,
            continue_from=len(self._ids) - self._prompt_length,
            trace=request.trace,
        )

    def _propose(self) -> Proposal:
        start_ms = self._now_ms()
        draft = self._drafter.propose(self._ids)
        return Proposal(draft, start_ms, self._now_ms() - start_ms)

    def _round(self) -> None:
        """Draft, verify, commit."""
        length = len(self._ids)
        self._pending = proposal = self._pending or self._propose()
        draft = proposal.draft
        sent_ms = self._now_ms()
        reply = self._verify(draft)
        wait_ms = self._now_ms() - sent_ms
        traffic = self._transport.traffic
        self._pending = None
        self._take(reply.tokens, reply.finished)
        commit_start_ms = self._now_ms()
        if not self.finished:
            self._drafter.observe(reply.accepted, self._ids, Given(reply.handoff))
        self._rounds.append(
            RoundTrace(
                round=reply.round,
                start_ms=proposal.start_ms,
                length=length,
                tree=draft.tree,
                accepted=tuple(reply.accepted),
                drawn=tuple(reply.drawn),
                tokens=tuple(reply.tokens),
                finished=reply.finished,
                drafted=reply.drafted,
                head_ms=draft.head_ms,
                slm_ms=draft.slm_ms,
                draft_ms=proposal.draft_ms,
                wait_ms=wait_ms,
                commit_ms=self._now_ms() - commit_start_ms,
                server_ms=reply.server_ms,
                traffic=traffic,
                evidence=reply.evidence,
            )
        )

    def _verify(self, draft: Draft) -> wire.VerifyReply:
        """Send the tree as the next round; the number counts up only when the reply is there."""
        number = self._round_number + 1
        message = wire.VerifyRequest(
            version=wire.PROTOCOL_VERSION,
            length=len(self._ids),
            digest=wire.committed_digest(self._ids),
            tokens=list(draft.tree.tokens),
            parents=list(draft.tree.parents),
        )
        reply = self._transport.verify(self._session, number, message)
        check_reply(reply, number, draft)
        self._round_number = number
        return reply

    def _take(self, tokens: Sequence[int], finished: str) -> None:
        """Append what the server committed.

        Raises:
            ProtocolError: code token_cap, more than was asked for: such a server might never finish.
        """
        generated = len(self._ids) - self._prompt_length + len(tokens)
        if generated > self._request.max_new_tokens:
            limit = self._request.max_new_tokens
            raise ProtocolError("token_cap", f"{generated} new tokens, asked for {limit} at most")
        self._last_token_ms = self._now_ms()
        if len(self._ids) == self._prompt_length:
            self._first_token_ms = self._last_token_ms
        self._ids.extend(tokens)
        self.finished = finished

    def close(self) -> None:
        """Free the session. A server that cannot answer this frees it by expiry, so its failure is not ours."""
        if self._session:
            with suppress(ServerError, ProtocolError):
                self._transport.close_session(self._session)

    def trace(self) -> GenerationTrace:
        return GenerationTrace(
            system=self._request.system,
            prompt_id=self._request.prompt_id,
            seed=self._request.seed,
            prompt_length=self._prompt_length,
            tokens=tuple(self._ids[self._prompt_length :]),
            finished=self.finished,
            total_ms=self._last_token_ms,
            first_token_ms=self._first_token_ms,
            primes=tuple(self._primes),
            rounds=tuple(self._rounds),
            sampling=self._request.sampling,
            acceptance=self._request.acceptance,
            max_new_tokens=self._request.max_new_tokens,
            stop_ids=self._request.stop_ids,
        )

    def _now_ms(self) -> float:
        return (self._clock() - self._started) * 1e3


def check_reply(reply: wire.VerifyReply, number: int, draft: Draft) -> None:
    """A verdict must be about the round and the tree that were sent: a wrong one would poison every later round.

    Raises:
        ProtocolError: codes round_mismatch, empty_round, path_mismatch.
    """
    if reply.round != number:
        raise ProtocolError("round_mismatch", f"reply to round {reply.round}, sent round {number}")
    if not reply.tokens:
        raise ProtocolError("empty_round", f"round {number} committed no token")
    if reply.drafted:  # the server's own chain: its rows are not ours to check
        return
    if not reply.finished and len(reply.tokens) != len(reply.accepted) + 1:
        seen = f"{len(reply.tokens)} tokens for {len(reply.accepted)} accepted rows"
        raise ProtocolError("path_mismatch", f"round {number}: {seen}, expected one more")
    parent = ROOT
    for depth, (row, token) in enumerate(zip(reply.accepted, reply.tokens, strict=False), start=1):
        tree = draft.tree
        if not 0 <= row < len(tree) or tree.parents[row] != parent or tree.tokens[row] != token:
            raise ProtocolError("path_mismatch", f"round {number}: accepted row {row} is off the path at depth {depth}")
        parent = row
