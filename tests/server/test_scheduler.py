"""Passes of several calls: what shares one, who waits how long, whose time it is, and whom a fault ends."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hyco_export.server.admission import Batching
from hyco_export.server.interfaces import Chain, Check, Prefill
from hyco_export.server.scheduler import choose
from tests.server.test_engine import PROMPT, Crowd, Passes, prime_request, round_request


def test_calls_that_wait_share_a_pass_of_limited_size() -> None:
    crowd = Crowd(5, Batching(sessions=3))
    blocker = crowd.block()
    started = []
    for place in range(5):
        started.append(crowd.round(place))
        crowd.wait_for_queue(place + 1)
    crowd.go()
    for place, call in enumerate(started):
        assert call.result().tokens == crowd.model.greedy(crowd.ids[place], len(call.result().tokens))
    assert blocker.result().root
    assert [len(parts) for parts in crowd.passes.seen] == [1, 3, 2]


def test_a_pass_waits_a_bounded_time_for_company_that_may_come() -> None:
    crowd = Crowd(2, Batching(sessions=3, wait_ms=1_500.0))
    started = [crowd.round(place) for place in range(2)]  # all sessions there are: nobody else is waited for
    assert [call.result().round for call in started] == [1, 1]
    assert [len(parts) for parts in crowd.passes.seen] == [2]
    patient = Crowd(2, Batching(sessions=3, wait_ms=1.0))
    assert patient.round(0).result().round == 1  # the other one never comes


def test_a_fault_in_a_pass_fails_its_sessions_and_no_other() -> None:
    crowd = Crowd(4, Batching(sessions=2))
    crowd.passes.fault_in = lambda parts: any(part.session is crowd.opened[1] for part in parts)
    crowd.block()
    started = []
    for place in range(4):
        started.append(crowd.round(place))
        crowd.wait_for_queue(place + 1)
    crowd.go()
    outcomes = [call.result() for call in started]
    assert [getattr(outcome, "code", "") for outcome in outcomes] == ["model_fault", "model_fault", "", ""]
    assert outcomes[0].hint == "prime again with the committed ids"
    assert [session.closed for session in crowd.opened[:4]] == [True, True, False, False]
    crowd.passes.fault_in = lambda _: False
    for place in (2, 3):
        ids = [*crowd.ids[place], *outcomes[place].tokens]
        crowd.engine.verify(crowd.primed[place].session, 2, round_request(ids))
    again = crowd.engine.prime(prime_request(prompt=crowd.ids[0], continue_from=1))
    assert again.root == crowd.model.greedy(crowd.ids[0], 1)[0]


def test_a_verdict_that_cannot_be_made_fails_its_session_alone() -> None:
    crowd = Crowd(2, Batching(sessions=2))
    crowd.opened[0].commit = lambda accepted: 1 / 0  # type: ignore[method-assign,assignment]
    crowd.block()
    started = [crowd.round(place) for place in range(2)]
    crowd.wait_for_queue(2)
    crowd.go()
    codes = sorted(getattr(call.result(), "code", "") for call in started)
    assert codes == ["", "model_fault"] and crowd.opened[0].closed and not crowd.opened[1].closed


def test_long_prompts_go_in_pieces_between_which_others_have_their_rounds() -> None:
    crowd = Crowd(2, Batching(sessions=4, prefill_rows=8))
    crowd.block()
    long = crowd.start(crowd.engine.prime, prime_request(prompt=[4] * 36, max_new_tokens=3))
    crowd.wait_for_queue(1)
    rounds = [crowd.round(0), crowd.round(1)]
    crowd.wait_for_queue(3)
    crowd.go()
    assert all(call.result().round == 1 for call in rounds)
    assert long.result().root == crowd.model.greedy([4] * 36, 1)[0]
    rows = [[part.rows for part in parts] for parts in crowd.passes.seen]
    assert rows[1] == [8, 3, 3] and [sizes[0] for sizes in rows[2:]] == [8, 8, 8, 4]


class Stub:
    """A waiting call as `choose` sees it."""

    def __init__(self, session: int, prompt_rows: int, pieces: int) -> None:
        self.session = session
        self.prompt_rows = prompt_rows
        self.pieces = pieces


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 8), st.integers(1, 4)), max_size=14),
    st.integers(1, 5),
)
def test_nobody_starves(waiting: list[tuple[int, int, int]], sessions: int) -> None:
    batching = Batching(sessions=sessions, prefill_rows=8)
    queue = [Stub(session, rows, pieces if rows else 1) for session, rows, pieces in waiting]
    passes = 0
    while queue:
        passes += 1
        head, chosen = queue[0], choose(queue, batching)
        assert chosen[0] is head and len(chosen) <= sessions
        assert len({call.session for call in chosen}) == len(chosen)
        assert sum(call.prompt_rows for call in chosen) <= 8
        queue = [call for call in queue if call not in chosen]
        for call in chosen:
            call.pieces -= 1
        queue += [call for call in chosen if call.pieces]
    assert passes <= sum(pieces if rows else 1 for _, rows, pieces in waiting)


def test_server_time_is_the_calls_share_by_rows() -> None:
    class Counting:
        name = "test"
        now_ms = 0.0

        def start(self) -> float:
            return self.now_ms

        def elapsed_ms(self, mark: float) -> float:
            return self.now_ms - mark

    clock = Counting()

    class Timed(Passes):
        def forward(self, parts: Sequence[Prefill | Check]) -> list[np.ndarray]:
            outputs = super().forward(parts)
            clock.now_ms += 12.0
            return outputs

        def draft(self, chains: Sequence[Chain]) -> list[tuple[int, ...]]:
            clock.now_ms += 5.0
            return super().draft(chains)

    crowd = Crowd(2, Batching())
    crowd.passes = Timed()
    crowd.engine._scheduler._models, crowd.engine._scheduler._clock = crowd.passes, clock
    on_server = crowd.engine.prime(prime_request(draft_side="server", draft_steps=4))
    crowd.block()
    calls = [
        crowd.round(0),  # 3 rows
        crowd.start(crowd.engine.verify, crowd.primed[1].session, 1, round_request(crowd.ids[1])),  # 1 row
        crowd.start(crowd.engine.verify, on_server.session, 1, round_request([*PROMPT, on_server.root])),  # 5 rows
    ]
    crowd.wait_for_queue(3)
    crowd.go()
    assert [call.result().server_ms for call in calls] == pytest.approx([12 * 3 / 9, 12 / 9, 5 + 12 * 5 / 9])
