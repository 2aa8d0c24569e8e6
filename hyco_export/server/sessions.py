"""Sessions and their calls: a session's state, and what each PRIME and VERIFY in flight makes of it, pass by pass.

Nothing here is thread-safe. A session's state changes with the engine's lock held, or in a pass that it takes part in.

Legend: N nodes, V vocabulary.
"""

import contextlib
import secrets
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from typing import Any, Generic, TypeVar

import numpy as np

from hyco_export.errors import ProtocolError
from hyco_export.protocol import wire
from hyco_export.protocol.acceptance import EVERYTHING, RULES, Judged, Outcome, Query, decide, finish_reason, settle
from hyco_export.protocol.tree import ROOT, check_kept, check_tree, joined, joined_path
from hyco_export.server.admission import PRIME_AGAIN, CacheBudget, Facts, no_such_session
from hyco_export.server.first_window import OlderRows, split_window
from hyco_export.server.interfaces import Chain, Check, DraftedChain, Prefill, VerifierSession

ID_BYTES = 16  # 128 random bits: an id cannot be guessed
Cancelled = Callable[[], bool]  # has the caller gone away: asked before each pass that is made for it
Reply = TypeVar("Reply", wire.PrimeReply, wire.VerifyReply)


class Session:
    """One generation: its settings, its committed ids (prompt and root included), its place in the protocol.

    verifier: None once finished, when the cache is freed. calls: in flight. opening: its PRIME has not been answered.
    replaced: that PRIME was sent again. in_pass: then a drop frees the cache after the pass. dropped: forgotten.
    drafted: by the server for the next round, while the last reply travelled. older: rows of the first window that are
    still to be sent. prefilled: ids of its prompt that were processed while it opens.
    """

    def __init__(self, request: wire.PrimeRequest, owner: str, budget: CacheBudget) -> None:
        self.id = secrets.token_urlsafe(ID_BYTES)
        self.settings = request
        self.owner = owner
        self.verifier: VerifierSession | None = None
        self.calls = 0
        self.opening = True
        self.prefilled = 0
        self.replaced = False
        self.in_pass = False
        self.dropped = False
        self.committed = array("i", request.prompt)
        self.room = request.max_new_tokens - request.continue_from  # tokens that may still be committed
        self.next_round = 1
        self.answered: tuple[wire.VerifyRequest, wire.VerifyReply] | None = None  # the last round, kept for retries
        self.drafted: DraftedChain | None = None
        self.older: OlderRows | None = None
        self.last_used_s = 0.0
        self._budget = budget
        self._reserved_bytes = 0

    @property
    def length(self) -> int:
        return len(self.committed)

    @property
    def root(self) -> int:
        """The newest committed token, not yet processed by the verifier."""
        return self.committed[-1]

    @property
    def positions(self) -> int:
        """Ids that may ever be committed."""
        return self.length + self.room

    def reserve(self, size_bytes: int, next_expiry_s: float | None) -> None:
        """Take the cache's memory out of the budget; refused as `CacheBudget.take` says."""
        self._budget.take(size_bytes, next_expiry_s)
        self._reserved_bytes = size_bytes

    def extend(self, tokens: Sequence[int]) -> None:
        """Commit tokens."""
        self.committed.extend(tokens)
        self.room -= len(tokens)

    def finish(self) -> None:
        """No more rounds: free the cache, keep the last reply for retries."""
        if self.verifier is not None:
            self.verifier.close()
            self.verifier = None
        self._budget.give_back(self._reserved_bytes)
        self._reserved_bytes = 0

    def chain(self, side: wire.DraftSide) -> Chain | None:
        """What the server's head is to draft behind the root where the session's draft side is this one; None where
        nothing may follow or a chain is there already."""
        settings = self.settings
        if settings.draft_side != side or self.verifier is None or self.drafted is not None:
            return None
        steps = min(settings.draft_steps, self.room - 1)  # the bonus takes the last place
        return Chain(self.verifier, self.root, steps, settings.draft_scope == "artifact") if steps else None

    def stored_reply(self, round_number: int, request: wire.VerifyRequest) -> wire.VerifyReply | None:
        """The reply of the last round if this is its retry; None if this is the next round.

        Raises:
            ProtocolError: codes round_stale, round_future, round_differs.
        """
        if round_number == self.next_round:
            return None
        if round_number > self.next_round:
            raise ProtocolError("round_future", f"round {round_number}, but {self.next_round} is next", PRIME_AGAIN)
        if round_number < self.next_round - 1 or self.answered is None:
            raise ProtocolError("round_stale", f"round {round_number}, but {self.next_round} is next", PRIME_AGAIN)
        answered, reply = self.answered
        if request != answered:
            raise ProtocolError("round_differs", f"round {round_number} was answered for another body", PRIME_AGAIN)
        return reply

    def check_committed(self, request: wire.VerifyRequest) -> None:
        """Device and server must count and hold the same committed ids.

        Raises:
            ProtocolError: codes session_finished, length_differs, digest_differs.
        """
        if self.verifier is None:
            raise ProtocolError("session_finished", "this generation has ended", "delete the session")
        if request.length != self.length:
            seen = f"the device counts {request.length} committed ids, the server {self.length}"
            raise ProtocolError("length_differs", seen, PRIME_AGAIN)
        if request.digest != wire.committed_digest(self.committed):
            raise ProtocolError("digest_differs", "the device's committed ids are not the server's", PRIME_AGAIN)


class PendingRequest(ABC, Generic[Reply]):
    """A call that waits for passes.

    prompt_rows: rows of a prompt that its next pass needs. server_ms: its share of passes and its own work so far.
    """

    def __init__(self, session: Session, facts: Facts, cancelled: Cancelled | None) -> None:
        self.session = session
        self.future: Future[Reply] = Future()
        self.prompt_rows = 0
        self.server_ms = 0.0
        self._facts = facts
        self._cancelled = cancelled

    def begin(self) -> Reply | None:
        """Before a pass: a reply that needs none, or None.

        Raises:
            ProtocolError: the call cannot be made.
        """
        if self.session.dropped:
            raise no_such_session()
        if self.session.replaced or (self._cancelled is not None and self._cancelled()):
            raise ProtocolError("cancelled", "the caller went away before its turn")
        return None

    def chain(self) -> Chain | None:
        """What the server's own head is to draft before the pass."""
        return None

    @abstractmethod
    def part(self, drafted: DraftedChain | None) -> Prefill | Check:
        """What the pass computes for this call, with what the server has drafted for it."""

    @abstractmethod
    def query(self, logits: Any) -> Query | None:
        """What is asked of the pass's logits of this call; None when it needs another pass first."""

    @abstractmethod
    def finish(self, judged: Judged) -> None:
        """Decide and commit."""

    @abstractmethod
    def reply(self, drafted: DraftedChain | None) -> Reply:
        """The finished call's reply, with what the server has drafted for the device's next tree."""

    def answer(self, outcome: Reply | Exception) -> None:
        """Give the caller its reply or the error; nothing where it was given up when the engine stopped."""
        with contextlib.suppress(InvalidStateError):
            if isinstance(outcome, Exception):
                self.future.set_exception(outcome)
            else:
                self.future.set_result(outcome)

    @property
    def _verifier(self) -> VerifierSession:
        assert self.session.verifier is not None  # a dropped or finished session gets no pass
        return self.session.verifier

    def _taken(self, drafted: DraftedChain | None) -> list[int]:
        """A chain's tokens; what it cost is this call's."""
        if drafted is None:
            return []
        self.server_ms += drafted.server_ms
        return list(drafted.tokens)

    def _handoff(self, new_rows: int) -> wire.Handoff | None:
        """For sessions whose device runs the head: K/V of the newest processed positions, at most a window."""
        if not self.session.settings.head_digest:
            return None
        return self._verifier.handoff(self.session.root, min(new_rows, self._facts.handoff_window))


class PendingPrime(PendingRequest[wire.PrimeReply]):
    """A prompt, in pieces of at most `prefill_rows`, then the first token."""

    def __init__(self, session: Session, facts: Facts, prefill_rows: int, cancelled: Cancelled | None) -> None:
        super().__init__(session, facts, cancelled)
        self._prefill_rows = prefill_rows
        self._processed = 0  # ids of the prompt
        self.prompt_rows = min(prefill_rows, len(session.settings.prompt))
        self._finished = ""
        self._first_handoff: wire.Handoff | None = None

    def part(self, drafted: DraftedChain | None) -> Prefill:
        if self._processed == 0:
            self._verifier.reserve(self.session.positions)
        self.session.prefilled = self._processed
        piece = self.session.settings.prompt[self._processed : self._processed + self.prompt_rows]
        return Prefill(self._verifier, np.asarray(piece, np.int64))

    def query(self, logits: Any) -> Query | None:
        settings = self.session.settings
        self._processed += self.prompt_rows
        self.prompt_rows = min(self._prefill_rows, len(settings.prompt) - self._processed)
        if self.prompt_rows:
            return None
        return Query(logits, (), (), len(settings.prompt) - 1, settings.sampling, settings.seed)

    def finish(self, judged: Judged) -> None:
        session, settings = self.session, self.session.settings
        (root,) = judged.draws
        self._finished = finish_reason([root], self._facts.stop_ids, session.room)
        session.extend([root])
        if self._finished:
            session.finish()
        else:
            self._first_handoff = self._handoff(len(settings.prompt))

    def reply(self, drafted: DraftedChain | None) -> wire.PrimeReply:
        session, chain = self.session, self._taken(drafted)
        reply = wire.PrimeReply(
            version=wire.PROTOCOL_VERSION,
            session=session.id,
            root=session.root,
            length=session.length,
            finished=self._finished,
            handoff=self._first_handoff,
            server_ms=self.server_ms,
            chain=chain,
        )
        reply, session.older = split_window(reply, session.settings.first_rows)
        return reply


class PendingRound(PendingRequest[wire.VerifyReply]):
    """One round of a session: the device's tree or the server's own chain."""

    def __init__(
        self,
        session: Session,
        number: int,
        request: wire.VerifyRequest,
        facts: Facts,
        node_limit: int,
        cancelled: Cancelled | None,
    ) -> None:
        super().__init__(session, facts, cancelled)
        self._number = number
        self._request = request
        self._node_limit = node_limit
        self._on_server = session.settings.draft_side == "server"
        self._tokens: Sequence[int] = request.tokens  # [N], and parents [N]: the tree that is judged
        self._parents: Sequence[int] = request.parents
        self._outcome: Outcome | None = None
        self._evidence: wire.Evidence | None = None
        self._next_handoff: wire.Handoff | None = None

    def begin(self) -> wire.VerifyReply | None:
        """The stored reply where this round is a repeated one.

        Raises:
            ProtocolError: codes unknown_session, round_*, session_finished, length_differs, digest_differs,
                unsupported, cancelled, those of `check_tree`.
        """
        super().begin()
        session, kept = self.session, self._request.kept
        stored = session.stored_reply(self._number, self._request)
        if stored is not None:
            return stored
        session.check_committed(self._request)
        if self._on_server and (self._tokens or self._parents):
            raise ProtocolError("unsupported", "the server drafts in this session, the body must hold no tree")
        vocab_size = self._facts.vocab_size
        check_tree(self._tokens, self._parents, vocab_size, self._node_limit)
        if kept:
            check_kept(kept, session.settings.unverified, self._facts.stop_ids, session.room)
            check_tree(*joined(kept, self._tokens, self._parents), vocab_size, self._node_limit)
        return None

    def chain(self) -> Chain | None:
        return self.session.chain("server")

    def part(self, drafted: DraftedChain | None) -> Check:
        drafted, self.session.drafted = self.session.drafted or drafted, None
        if drafted is not None:
            self._tokens = self._taken(drafted)
            self._parents = range(ROOT, ROOT + len(self._tokens))
        tokens, parents = self._tokens, self._parents
        if self._request.kept:
            tokens, parents = joined(self._request.kept, tokens, parents)
        return Check(self._verifier, self.session.root, np.asarray(tokens, np.int64), np.asarray(parents, np.int64))

    def query(self, logits: Any) -> Query:
        settings, kept = self.session.settings, len(self._request.kept)
        reads = EVERYTHING if settings.trace else RULES[settings.acceptance.rule].reads
        root_position = self.session.length - 1 + kept
        sampling, seed = settings.sampling, settings.seed
        return Query(logits[kept:], self._tokens, self._parents, root_position, sampling, seed, reads)

    def finish(self, judged: Judged) -> None:
        session, kept, stop_ids = self.session, self._request.kept, self._facts.stop_ids
        verdict = decide(judged, session.settings.acceptance, stop_ids)
        self._evidence = judged.evidence() if session.settings.trace else None
        outcome = settle(verdict, self._tokens, stop_ids, session.room - len(kept))
        path = joined_path(kept, outcome.accepted)
        session.extend([*kept, *outcome.tokens])
        self._outcome = outcome
        if outcome.finished:
            session.finish()
        else:
            self._verifier.commit(path)
            self._next_handoff = self._handoff(1 + len(path))

    def reply(self, drafted: DraftedChain | None) -> wire.VerifyReply:
        assert self._outcome is not None
        session, handoff, chain = self.session, self._next_handoff, self._taken(drafted)
        if session.older is not None and handoff is not None:
            handoff = session.older.attach(handoff, self._number)
            if self._number >= session.older.parts:
                session.older = None
        reply = wire.VerifyReply(
            version=wire.PROTOCOL_VERSION,
            round=self._number,
            accepted=list(self._outcome.accepted),
            drawn=list(self._outcome.drawn),
            tokens=list(self._outcome.tokens),
            finished=self._outcome.finished,
            handoff=handoff,
            drafted=len(self._tokens) if self._on_server else 0,
            server_ms=self.server_ms,
            evidence=self._evidence,
            chain=chain,
        )
        session.answered = self._request, reply
        session.next_round += 1
        return reply
