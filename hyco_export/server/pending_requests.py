"""PRIME and VERIFY requests in flight: what each needs of the next pass, and what its logits make of the session.

Legend: N nodes, V vocabulary.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np

from hyco_export.errors import ProtocolError
from hyco_export.protocol import wire
from hyco_export.protocol.acceptance import Outcome, finish_reason, judge, settle
from hyco_export.protocol.sampling import first_token
from hyco_export.protocol.tree import ROOT, check_kept, check_tree, joined, joined_path
from hyco_export.server.admission import Facts, Limits
from hyco_export.server.interfaces import Chain, Check, Gone, Prefill, VerifierSession
from hyco_export.server.sessions import Answered, Session, no_such_session


class PendingRequest(ABC):
    """A call that waits for passes.

    server_ms: its share of passes and its own work so far. along: tokens that the server's head drafted to go with the
    reply.
    """

    def __init__(self, session: Session, facts: Facts, gone: Gone) -> None:
        self.session = session
        self.future: Future[Any] = Future()
        self.server_ms = 0.0
        self.along: Sequence[int] = ()
        self._facts = facts
        self._gone = gone

    def begin(self) -> Any:
        """Before a pass: a reply that needs none, or None.

        Raises:
            ProtocolError: the call cannot be made.
        """
        if self.session.dropped:
            raise no_such_session()
        if self._gone():
            raise ProtocolError("cancelled", "the caller went away before its turn")
        return None

    @property
    @abstractmethod
    def prompt_rows(self) -> int:
        """As `scheduler.Waiting`."""

    def chain(self) -> Chain | None:
        """What the server's own head is to draft before the pass."""
        return None

    def reply_chain(self) -> Chain | None:
        """What the server's own head is to draft before the reply of a call that needs no further pass."""
        return self._chain_of("reply")

    def next_chain(self) -> Chain | None:
        """What the server's own head can draft for the session's next round, when this call has been answered."""
        return self._chain_of("server")

    @abstractmethod
    def part(self, chain: Sequence[int]) -> Prefill | Check:
        """What the pass computes for this call; `chain` is what the server drafted for it."""

    @abstractmethod
    def finish(self, logits: np.ndarray) -> bool:
        """Judge and commit; False when another pass is needed."""

    @abstractmethod
    def reply(self) -> Any:
        """The finished call's reply."""

    @property
    def _verifier(self) -> VerifierSession:
        assert self.session.verifier is not None  # a dropped or finished session gets no pass
        return self.session.verifier

    def _own_chain(self) -> Chain | None:
        """What the server's head can draft after the root."""
        session, settings = self.session, self.session.settings
        steps = min(settings.draft_steps, session.room - 1)  # the bonus takes the last place
        return Chain(self._verifier, session.root, steps, settings.draft_scope == "artifact") if steps else None

    def _chain_of(self, side: str) -> Chain | None:
        """After the new root, where the session lets this side draft and goes on."""
        wanted = self.session.settings.draft_side == side and self.session.verifier is not None
        return self._own_chain() if wanted else None

    def _handoff(self, new_rows: int) -> wire.Handoff | None:
        """For sessions whose device runs the head: K/V of the newest processed positions, at most a window."""
        session = self.session
        if not session.settings.head_digest or session.verifier is None:
            return None
        return session.verifier.handoff(session.root, min(new_rows, self._facts.handoff_window))


class PendingPrime(PendingRequest):
    """A prompt, in pieces of at most `prefill_rows`, then the first token."""

    def __init__(self, session: Session, facts: Facts, prefill_rows: int, gone: Gone) -> None:
        super().__init__(session, facts, gone)
        self._prefill_rows = prefill_rows
        self._done = 0  # ids of the prompt that are processed
        self._finished = ""
        self._first_handoff: wire.Handoff | None = None

    @property
    def prompt_rows(self) -> int:
        return min(self._prefill_rows, len(self.session.settings.prompt) - self._done)

    def part(self, chain: Sequence[int]) -> Prefill:
        if self._done == 0:
            self._verifier.reserve(self.session.positions)
        piece = self.session.settings.prompt[self._done : self._done + self.prompt_rows]
        return Prefill(self._verifier, np.asarray(piece, np.int64))

    def finish(self, logits: np.ndarray) -> bool:
        session, settings = self.session, self.session.settings
        self._done += self.prompt_rows
        if self._done < len(settings.prompt):
            return False
        root = first_token(logits, settings.sampling, settings.seed, len(settings.prompt) - 1)
        self._finished = finish_reason([root], self._facts.stop_ids, session.room)
        session.extend([root])
        if self._finished:
            session.finish()
        else:
            self._first_handoff = self._handoff(len(settings.prompt))
        return True

    def reply(self) -> wire.PrimeReply:
        return wire.PrimeReply(
            version=wire.PROTOCOL_VERSION,
            session=self.session.id,
            root=self.session.root,
            length=self.session.length,
            finished=self._finished,
            handoff=self._first_handoff,
            server_ms=self.server_ms,
            chain=list(self.along),
        )


class PendingRound(PendingRequest):
    """One round of a session: the device's tree or the server's own chain."""

    def __init__(
        self, session: Session, number: int, request: wire.VerifyRequest, facts: Facts, limits: Limits, gone: Gone
    ) -> None:
        super().__init__(session, facts, gone)
        self._number = number
        self._request = request
        self._limits = limits
        self._tokens: Sequence[int] = request.tokens
        self._parents: Sequence[int] = request.parents
        self._outcome: Outcome | None = None
        self._evidence: wire.Evidence | None = None
        self._next_handoff: wire.Handoff | None = None

    prompt_rows = 0

    @property
    def _on_server(self) -> bool:
        return self.session.settings.draft_side == "server"

    def begin(self) -> wire.VerifyReply | None:
        """The stored reply where this round is a repeated one.

        Raises:
            ProtocolError: codes unknown_session, round_*, session_finished, length_differs, digest_differs,
                unsupported, cancelled, those of `check_tree`.
        """
        super().begin()
        stored = self.session.stored_reply(self._number, self._request)
        if stored is not None:
            return stored
        self.session.check_belief(self._request)
        if self._on_server and (self._tokens or self._parents):
            raise ProtocolError("unsupported", "the server drafts in this session, the body must hold no tree")
        kept, vocab_size, limit = self._request.kept, self._facts.vocab_size, self._limits.node_limit
        check_tree(self._tokens, self._parents, vocab_size, limit)
        check_kept(kept, self.session.settings.unverified, self._facts.stop_ids, self.session.room)
        check_tree(*joined(kept, self._tokens, self._parents), vocab_size, limit)
        return None

    def chain(self) -> Chain | None:
        return self._own_chain() if self._on_server and self.session.ahead is None else None

    def part(self, chain: Sequence[int]) -> Check:
        ahead, self.session.ahead = self.session.ahead, None
        if ahead is not None:
            chain = ahead.chain
            self.server_ms += ahead.server_ms
        if self._on_server:
            self._tokens, self._parents = chain, range(ROOT, ROOT + len(chain))
        tokens, parents = joined(self._request.kept, self._tokens, self._parents)
        tree = np.asarray(tokens, np.int64), np.asarray(parents, np.int64)
        return Check(self._verifier, self.session.root, *tree)

    def finish(self, logits: np.ndarray) -> bool:
        session, kept, stop_ids = self.session, self._request.kept, self._facts.stop_ids
        root_position = session.length - 1 + len(kept)
        verdict, self._evidence = judge(
            logits[len(kept) :], self._tokens, self._parents, root_position, session.settings, stop_ids
        )
        outcome = settle(verdict, self._tokens, stop_ids, session.room - len(kept))
        session.extend([*kept, *outcome.tokens])
        self._outcome = outcome
        if outcome.finished:
            session.finish()
        else:
            path = joined_path(kept, outcome.accepted)
            self._verifier.commit(path)
            self._next_handoff = self._handoff(1 + len(path))
        return True

    def reply(self) -> wire.VerifyReply:
        assert self._outcome is not None
        reply = wire.VerifyReply(
            version=wire.PROTOCOL_VERSION,
            round=self._number,
            accepted=list(self._outcome.accepted),
            drawn=list(self._outcome.drawn),
            tokens=list(self._outcome.tokens),
            finished=self._outcome.finished,
            handoff=self._next_handoff,
            drafted=len(self._tokens) if self._on_server else 0,
            server_ms=self.server_ms,
            evidence=self._evidence,
            chain=list(self.along),
        )
        self.session.answered = Answered(self._request, reply)
        self.session.next_round += 1
        return reply
