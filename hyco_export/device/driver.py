"""The device's loop: prime, draft, verify, commit, until the answer is finished; every step is recorded.

The device owns the committed tokens: when the server has lost a session, all of them are sent again in a new PRIME and
generation goes on behind them.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress

import msgspec

from hyco_export.core.numerics import MS_PER_S
from hyco_export.device.calls import Overlap
from hyco_export.device.drafters import Draft, Drafter, ProactiveDrafter
from hyco_export.device.interfaces import Given, Request, Transport
from hyco_export.device.kv_state import check_ids, check_reply
from hyco_export.device.offload import AskForAll, OffloadPolicy
from hyco_export.errors import ProtocolError, ServerError
from hyco_export.protocol import wire
from hyco_export.protocol.acceptance import cut_length, finish_reason
from hyco_export.protocol.trace import GenerationTrace, LocalTrace, PrimeTrace, RoundTrace
from hyco_export.protocol.tree import Tree, subtree

Clock = Callable[[], float]  # seconds


class Proposal(msgspec.Struct, frozen=True):
    """A draft whose verdict is outstanding; it is sent again unchanged until the verdict arrives.

    `tree` is what is sent, `rows` its rows in the draft; `path` the draft's rows above it, which the device kept.
    """

    draft: Draft
    tree: Tree
    rows: tuple[int, ...]
    path: tuple[int, ...]
    start_ms: float
    draft_ms: float


def generate(
    prompt_ids: Sequence[int],
    request: Request,
    drafter: Drafter,
    transport: Transport,
    clock: Clock = time.perf_counter,
    policy: OffloadPolicy | None = None,
) -> GenerationTrace:
    """Generate after `prompt_ids` until a stop id or the token cap.

    A session that the server no longer knows is primed again with every committed id; no committed token changes.

    Raises:
        ServerError: the server cannot be reached, retries included.
        ProtocolError: a refusal that cannot be mended, or a reply that does not fit what was sent.
    """
    return finish(Generation(prompt_ids, request, drafter, transport, clock, policy))


def finish(generation: "Generation") -> GenerationTrace:
    """Take steps until the answer is finished, and free the session.

    Raises:
        ServerError, ProtocolError: as `Generation.step`.
    """
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
        policy: OffloadPolicy | None = None,
    ) -> None:
        self._ids = list(prompt_ids)
        self._prompt_length = len(prompt_ids)
        self._request = request
        self._drafter = drafter
        self._transport = transport
        self._policy = policy or AskForAll()
        self._waiting = Overlap() if isinstance(drafter, ProactiveDrafter) else None
        self._clock = clock
        self._started = clock()
        self._session = ""
        self._round_number = 0
        self._pending: Proposal | None = None
        self._unsent: list[int] = []  # the newest ids, which the server does not know yet
        self._drafting = False  # has the drafter begun
        self._primes: list[PrimeTrace] = []
        self._rounds: list[RoundTrace] = []
        self._locals: list[LocalTrace] = []
        self._first_token_ms = 0.0
        self._last_token_ms = 0.0
        self._step_end_ms = 0.0  # of the last step that committed tokens
        self._lost_repeats = 0  # of a round that a lost session refused in the end
        self.finished = ""

    @property
    def ids(self) -> tuple[int, ...]:
        """All committed ids, the prompt's first."""
        return tuple(self._ids)

    def step(self) -> None:
        """One call: a round, or PRIME where there is no session yet or the server has lost it. Tokens that the device
        keeps may take the place of a call.

        Raises:
            ServerError: no answer; the same step may be taken again, a round's verdict waits on the server.
            ProtocolError: a refusal that cannot be mended, or a reply that does not fit what was sent.
        """
        if self._policy.asks and not self._session:
            self._prime()
            return
        if not self._drafting:
            self._begin(Given())
        self._pending = self._pending or self._propose()
        if self._pending is None:
            return
        try:
            self._round(self._pending)
        except ProtocolError as refusal:
            if refusal.code != wire.UNKNOWN_SESSION:
                raise
            self._session = ""
            self._lost_repeats += self._transport.traffic.repeats

    def _begin(self, given: Given) -> None:
        self._drafter.begin(self._ids, given)
        self._drafting = True

    def _prime(self) -> None:
        """Open a session on all committed ids; commits the token that the server draws."""
        start_ms = self._now_ms()
        sent = len(self._ids)
        reply = self._transport.prime(
            self._request.prime_request(self._ids, self._prompt_length, unverified=self._policy.keeps)
        )
        wait_ms = self._now_ms() - start_ms
        traffic = self._transport.traffic
        traffic = msgspec.structs.replace(traffic, repeats=traffic.repeats + self._lost_repeats)
        self._lost_repeats = 0
        self._session, self._round_number, self._pending, self._unsent = reply.session, 0, None, []
        if reply.length != sent + 1:
            raise ProtocolError("length_mismatch", f"{reply.length} ids after priming with {sent}, expected one more")
        self._take((reply.root,), reply.finished)
        prefill_start_ms = self._now_ms()
        if not self.finished:
            self._begin(self._given(reply, wait_ms))
        prefill_ms = self._now_ms() - prefill_start_ms
        continue_from = sent - self._prompt_length
        self._primes.append(
            PrimeTrace(
                start_ms=start_ms,
                prompt_length=sent,
                continue_from=continue_from,
                root=reply.root,
                finished=reply.finished,
                wait_ms=wait_ms,
                prefill_ms=prefill_ms,
                server_ms=reply.server_ms,
                traffic=traffic,
                lost_ms=self._end_step(disturbed=traffic.repeats > 0 or continue_from > 0),
            )
        )

    def _propose(self) -> Proposal | None:
        """Draft, and commit what the policy keeps; None where nothing of the draft is left to be verified."""
        start_ms = self._now_ms()
        draft = self._drafter.propose(self._ids)
        draft_ms = self._now_ms() - start_ms
        path = self._policy.keep(draft.tree, len(self._unsent)) if self._policy.keeps else ()
        if not path:
            return Proposal(draft, draft.tree, tuple(range(len(draft.tree.tokens))), (), start_ms, draft_ms)
        kept = self._keep(draft, path, start_ms, draft_ms)
        rest, rows = subtree(draft.tree, kept[-1])
        if not self.finished and self._policy.asks and rest.tokens:
            return Proposal(msgspec.structs.replace(draft, head_ms=0.0, slm_ms=0.0), rest, rows, kept, start_ms, 0.0)
        if not self.finished:
            self._drafter.observe(kept[:-1], self._ids, Given())  # the last one is the new root
        return None

    def _keep(self, draft: Draft, path: tuple[int, ...], start_ms: float, draft_ms: float) -> tuple[int, ...]:
        """Commit the tokens of `path` up to a stop id or the cap; the rows that were taken."""
        length = len(self._ids)
        tokens = [draft.tree.tokens[row] for row in path]
        room = self._request.max_new_tokens - (length - self._prompt_length)
        finished = finish_reason(tokens, frozenset(self._request.stop_ids), room)
        tokens = tokens[: cut_length(tokens, self._request.stop_ids, room)]
        self._take(tokens, finished)
        self._unsent += tokens
        kept = path[: len(tokens)]
        self._locals.append(
            LocalTrace(
                start_ms=start_ms,
                length=length,
                tree=draft.tree,
                kept=kept,
                tokens=tuple(tokens),
                finished=finished,
                head_ms=draft.head_ms,
                slm_ms=draft.slm_ms,
                draft_ms=draft_ms,
            )
        )
        self._end_step(disturbed=False)
        return kept

    def _round(self, proposal: Proposal) -> None:
        """Verify, commit."""
        kept = tuple(self._unsent)
        sent_ms = self._now_ms()
        reply, ahead_ms = self._verify(proposal)
        wait_ms = self._now_ms() - sent_ms
        traffic = self._transport.traffic
        self._pending = None
        self._unsent = []
        self._take(reply.tokens, reply.finished)
        commit_start_ms = self._now_ms()
        if not self.finished:
            ours = () if reply.drafted else reply.accepted  # rows of the server's own chain are not the drafter's
            accepted = (*proposal.path, *(proposal.rows[row] for row in ours))
            self._drafter.observe(accepted, self._ids, self._given(reply, wait_ms))
        commit_ms = self._now_ms() - commit_start_ms
        older_bytes = len(reply.handoff.older_kv) if reply.handoff else 0
        sent_twice = older_bytes > 0 and self._primes[-1].continue_from > 0
        self._rounds.append(
            RoundTrace(
                round=reply.round,
                start_ms=sent_ms if proposal.path else proposal.start_ms,
                length=len(self._ids) - len(reply.tokens) - len(kept),
                tree=proposal.tree,
                accepted=tuple(reply.accepted),
                drawn=tuple(reply.drawn),
                tokens=tuple(reply.tokens),
                finished=reply.finished,
                drafted=reply.drafted,
                head_ms=proposal.draft.head_ms,
                slm_ms=proposal.draft.slm_ms,
                draft_ms=proposal.draft_ms,
                wait_ms=wait_ms,
                commit_ms=commit_ms,
                server_ms=reply.server_ms,
                traffic=traffic,
                kept=kept,
                reused=proposal.draft.reused,
                ahead_ms=ahead_ms,
                evidence=reply.evidence,
                older_bytes=older_bytes,
                lost_ms=self._end_step(disturbed=traffic.repeats > 0 or sent_twice),
            )
        )

    def _end_step(self, *, disturbed: bool) -> float | None:
        """End a step; the milliseconds since the previous one if it was disturbed: figures of time leave them out."""
        since_ms, now_ms = self._step_end_ms, self._last_token_ms if self.finished else self._now_ms()
        self._step_end_ms = now_ms
        return now_ms - since_ms if disturbed else None

    def _verify(self, proposal: Proposal) -> tuple[wire.VerifyReply, float]:
        """Send the tree as the next round, drafting on meanwhile; the number counts up only when the reply is there.

        Returns:
            The reply, and the milliseconds of drafting.
        """
        number = self._round_number + 1
        known = self._ids[: len(self._ids) - len(self._unsent)]
        message = wire.VerifyRequest(
            version=wire.PROTOCOL_VERSION,
            length=len(known),
            digest=wire.committed_digest(known),
            tokens=list(proposal.tree.tokens),
            parents=list(proposal.tree.parents),
            kept=list(self._unsent),
        )
        reply, ahead_ms = self._call(number, message)
        check_reply(reply, number, proposal.tree)
        self._round_number = number
        return reply, ahead_ms

    def _call(self, number: int, message: wire.VerifyRequest) -> tuple[wire.VerifyReply, float]:
        def call() -> wire.VerifyReply:
            return self._transport.verify(self._session, number, message)

        if self._waiting is None:
            return call(), 0.0
        assert isinstance(self._drafter, ProactiveDrafter)
        return self._waiting.call(call, self._drafter.draft_ahead())

    def _given(self, reply: wire.PrimeReply | wire.VerifyReply, wait_ms: float) -> Given:
        """Raises ProtocolError: code token_range."""
        check_ids(reply.chain, self._request.vocab_size)
        return Given(reply.handoff, tuple(reply.chain), max(0.0, wait_ms - reply.server_ms))

    def _take(self, tokens: Sequence[int], finished: str) -> None:
        """Append what the server committed.

        Raises:
            ProtocolError: code token_cap, more than was asked for: such a server might never finish; token_range.
        """
        check_ids(tokens, self._request.vocab_size)
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
        if self._waiting is not None:
            self._waiting.close()
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
            locals=tuple(self._locals),
        )

    def _now_ms(self) -> float:
        return (self._clock() - self._started) * MS_PER_S
