"""The verifier engine: sessions and rounds over any VerifierSession. No torch, no HTTP.

One call at a time works on the model, with the sessions interleaved as their calls come in; which sessions exist beside
one changes nothing in it. A fault of the model ends the session it happened in and no other.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from hyco_export.errors import HycoError, ProtocolError
from hyco_export.runtime import rounds, wire
from hyco_export.runtime.admission import Facts, Limits, check_prime
from hyco_export.runtime.clocks import Clock, ThreadCpuClock
from hyco_export.runtime.guard.faults import place_of
from hyco_export.runtime.ports import VerifierSession
from hyco_export.runtime.sessions import PRIME_AGAIN, Answered, Session, SessionTable
from hyco_export.runtime.tree import ROOT, check_tree

_log = logging.getLogger(__name__)


class Engine:
    """PRIME, VERIFY and close, callable from any thread.

    Args:
        open_session: makes an empty VerifierSession.
        facts: what the models are.
        limits: what a caller gets at most.
        clock: measures server_ms: the whole call's work on the model's thread (forward, sampling, hand-off).
        now: monotonic seconds, for the expiry of idle sessions.
    """

    def __init__(
        self,
        open_session: Callable[[], VerifierSession],
        facts: Facts,
        limits: Limits | None = None,
        clock: Clock | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.facts = facts
        self.limits = limits or Limits()
        self.clock: Clock = clock or ThreadCpuClock()
        self._open_session = open_session
        self._table = SessionTable(self.limits.sessions, self.limits.idle_s, now)
        self._lock = threading.Lock()

    @property
    def session_count(self) -> int:
        return len(self._table)

    def prime(self, request: wire.PrimeRequest) -> wire.PrimeReply:
        """Prefill a prompt and draw the first token.

        Raises:
            ProtocolError: what `check_prime` refuses; codes sessions_full, model_fault.
        """
        check_prime(request, self.facts, self.limits)
        with self._lock:
            self._table.expire()
            self._table.require_room()
            mark = self.clock.start()
            with self._model_faults():
                session = Session(request, self._open_session())
            self._table.add(session)
            with self._model_faults(session):
                return self._prime(session, mark)

    def verify(self, session_id: str, round_number: int, request: wire.VerifyRequest) -> wire.VerifyReply:
        """Round `round_number` (1, 2, ...): judge the device's tree or the server's own chain, commit, hand off.

        The same round again returns the stored reply.

        Raises:
            ProtocolError: codes unknown_session, round_*, session_finished, length_differs, digest_differs,
                unsupported, those of `check_tree`, model_fault.
        """
        with self._lock:
            self._table.expire()
            session = self._table.find(session_id)
            stored = session.stored_reply(round_number, request)
            if stored is not None:
                return stored
            session.check_belief(request)
            self._check_drafts(session, request)
            with self._model_faults(session):
                reply = self._verify(session, round_number, request)
            session.answered = Answered(request, reply)
            session.next_round += 1
            return reply

    def close(self, session_id: str) -> None:
        """Free a session's cache and forget it; closing twice is closing once."""
        with self._lock:
            self._table.drop(session_id)

    def expire(self) -> int:
        """Drop idle sessions; how many."""
        with self._lock:
            return self._table.expire()

    def shut_down(self) -> None:
        """Free every session."""
        with self._lock:
            self._table.clear()

    def _check_drafts(self, session: Session, request: wire.VerifyRequest) -> None:
        if session.settings.draft_side == "server" and (request.tokens or request.parents):
            raise ProtocolError("unsupported", "the server drafts in this session, the body must hold no tree")
        check_tree(request.tokens, request.parents, self.facts.vocab_size, self.limits.node_limit)
        rounds.check_kept(request.kept, session.settings.unverified, self.facts.stop_ids, session.room)
        check_tree(
            *rounds.joined(request.kept, request.tokens, request.parents),
            self.facts.vocab_size,
            self.limits.node_limit,
        )

    def _prime(self, session: Session, mark: Any) -> wire.PrimeReply:
        settings, verifier = session.settings, session.verifier
        assert verifier is not None  # a session starts unfinished
        logits = verifier.prime(np.asarray(settings.prompt, np.int64))  # [V]
        root = rounds.first_token(logits, settings.sampling, settings.seed, len(settings.prompt) - 1)
        finished = rounds.finish_reason([root], self.facts.stop_ids, session.room)
        session.extend([root])
        handoff = None if finished else self._handoff(session, len(settings.prompt))
        chain = [] if finished else self._next_chain(session, verifier)
        if finished:
            session.finish()
        return wire.PrimeReply(
            version=wire.PROTOCOL_VERSION,
            session=session.id,
            root=root,
            length=session.length,
            finished=finished,
            handoff=handoff,
            server_ms=self.clock.elapsed_ms(mark),
            chain=chain,
        )

    def _verify(self, session: Session, round_number: int, request: wire.VerifyRequest) -> wire.VerifyReply:
        mark = self.clock.start()
        verifier = session.verifier
        assert verifier is not None  # check_belief refuses finished sessions
        kept = request.kept
        tokens, parents, drafted = self._drafts(session, verifier, request)
        all_tokens, all_parents = rounds.joined(kept, tokens, parents)
        rows = verifier.verify(session.root, np.asarray(all_tokens, np.int64), np.asarray(all_parents, np.int64))
        root_position = session.length - 1 + len(kept)
        verdict, evidence = rounds.judge(
            rows.logits[len(kept) :], tokens, parents, root_position, session.settings, self.facts.stop_ids
        )
        outcome = rounds.settle(verdict, tokens, self.facts.stop_ids, session.room - len(kept))
        session.extend([*kept, *outcome.tokens])
        handoff, chain = None, []
        if outcome.finished:
            session.finish()
        else:
            path = rounds.joined_path(kept, outcome.accepted)
            verifier.commit(path)
            handoff = self._handoff(session, 1 + len(path))
            chain = self._next_chain(session, verifier)
        return wire.VerifyReply(
            version=wire.PROTOCOL_VERSION,
            round=round_number,
            accepted=list(outcome.accepted),
            drawn=list(outcome.drawn),
            tokens=list(outcome.tokens),
            finished=outcome.finished,
            handoff=handoff,
            drafted=drafted,
            server_ms=self.clock.elapsed_ms(mark),
            evidence=evidence,
            chain=chain,
        )

    def _drafts(
        self, session: Session, verifier: VerifierSession, request: wire.VerifyRequest
    ) -> tuple[Sequence[int], Sequence[int], int]:
        """tokens [N], parents [N] to verify, and how many of them the server drafted."""
        if session.settings.draft_side != "server":
            return request.tokens, request.parents, 0
        chain = self._chain(session, verifier)
        return chain, range(ROOT, ROOT + len(chain)), len(chain)

    def _next_chain(self, session: Session, verifier: VerifierSession) -> list[int]:
        """What goes along with a reply."""
        return list(self._chain(session, verifier)) if session.settings.draft_side == "reply" else []

    def _chain(self, session: Session, verifier: VerifierSession) -> tuple[int, ...]:
        settings = session.settings
        steps = min(settings.draft_steps, session.room - 1)  # the bonus takes the last place
        return verifier.draft(session.root, steps, settings.draft_scope == "artifact") if steps else ()

    def _handoff(self, session: Session, new_rows: int) -> wire.Handoff | None:
        """For sessions whose device runs the head: K/V of the newest processed positions, at most a window."""
        if not session.settings.head_digest or session.verifier is None:
            return None
        return session.verifier.handoff(session.root, min(new_rows, self.facts.handoff_window))

    @contextmanager
    def _model_faults(self, session: Session | None = None) -> Iterator[None]:
        """Turn a fault of the model into a typed refusal and drop the session it happened in."""
        try:
            yield
        except Exception as error:
            if session is not None:
                self._table.drop(session.id)
            if isinstance(error, HycoError):
                raise
            _log.error("the model failed; its session is dropped: %s", place_of(error))
            raise ProtocolError("model_fault", f"the model failed: {type(error).__name__}", PRIME_AGAIN) from error
