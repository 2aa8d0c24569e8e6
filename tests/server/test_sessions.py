"""One session's calls: rounds in order, repeated rounds, where a path is cut, priming again."""

from collections.abc import Sequence

import msgspec
import numpy as np
import pytest

from hyco_export.protocol import wire
from hyco_export.protocol.tree import ROOT
from tests.server.test_engine import HEAD, PROMPT, Bench, prime_request, refusal, round_request
from tests.support.scripted import (
    STOP_ID,
    VOCAB_SIZE,
    ToyLanguageModel,
)


def test_a_repeated_round_returns_the_stored_reply_without_a_second_draw() -> None:
    bench = Bench()
    reply = bench.engine.prime(prime_request(sampling=wire.PAPER_SAMPLING))
    ids = [*PROMPT, reply.root]
    request = round_request(ids, [3, 4], [ROOT, ROOT])
    first = bench.engine.verify(reply.session, 1, request)
    assert bench.engine.verify(reply.session, 1, request) == first
    assert bench.opened[0].ids == [*ids, *first.tokens[:-1]]  # committed once
    other = msgspec.structs.replace(request, tokens=[3, 5])
    assert refusal(bench.engine.verify, reply.session, 1, other).code == "round_differs"
    second = bench.engine.verify(reply.session, 2, round_request([*ids, *first.tokens]))
    assert second.round == 2
    assert refusal(bench.engine.verify, reply.session, 1, request).code == "round_stale"


@pytest.mark.parametrize(("number", "code"), [(0, "round_stale"), (-3, "round_stale"), (2, "round_future")])
def test_rounds_out_of_order_are_refused(number: int, code: str) -> None:
    bench = Bench()
    reply = bench.engine.prime(prime_request())
    assert refusal(bench.engine.verify, reply.session, number, round_request([*PROMPT, reply.root])).code == code


def test_a_device_that_believes_something_else_is_refused_and_may_correct_itself() -> None:
    bench = Bench()
    reply = bench.engine.prime(prime_request())
    ids = [*PROMPT, reply.root]
    assert refusal(bench.engine.verify, reply.session, 1, round_request(ids[:-1])).code == "length_differs"
    wrong = round_request([*PROMPT, (reply.root + 1) % VOCAB_SIZE])
    refused = refusal(bench.engine.verify, reply.session, 1, wrong)
    assert refused.code == "digest_differs" and refused.hint == "prime again with the committed ids"
    assert bench.engine.verify(reply.session, 1, round_request(ids)).round == 1


class ForcedModel(ToyLanguageModel):
    """Says a given text whatever came before."""

    def __init__(self, text: Sequence[int], prompt_length: int) -> None:
        super().__init__()
        self._text = text
        self._prompt_length = prompt_length

    def logits(self, ids: Sequence[int]) -> np.ndarray:
        return np.eye(VOCAB_SIZE, dtype=np.float32)[self._text[len(ids) - self._prompt_length]] * 9


def test_the_path_is_cut_at_a_stop_id_and_the_cache_is_freed() -> None:
    bench = Bench(model=ForcedModel([4, 5, STOP_ID, 6, 7, 8, 9, 9, 9], len(PROMPT)))
    reply = bench.engine.prime(prime_request(head_digest=HEAD))
    ids = [*PROMPT, reply.root]
    request = round_request(ids, [5, STOP_ID, 6], [ROOT, 0, 1])
    answer = bench.engine.verify(reply.session, 1, request)
    assert (answer.tokens, answer.accepted, answer.drawn) == ([5, STOP_ID], [0, 1], [True, True])
    assert answer.finished == "stop" and answer.handoff is None
    assert bench.opened[0].closed
    assert bench.engine.verify(reply.session, 1, request) == answer  # a lost reply can still be had
    refused = refusal(bench.engine.verify, reply.session, 2, round_request([*ids, *answer.tokens]))
    assert refused.code == "session_finished"


@pytest.mark.parametrize(
    ("room", "tokens", "accepted", "finished"),
    [(1, [4], None, "length"), (2, [5], [0], "length"), (4, [5, 6, 7], [0, 1], "length"), (5, [5, 6, 7], [0, 1], "")],
)
def test_the_path_is_cut_at_the_token_cap(
    room: int, tokens: list[int], accepted: list[int] | None, finished: str
) -> None:
    bench = Bench(model=ForcedModel([4, 5, 6, 7, 8, 9, 9, 9], len(PROMPT)))
    reply = bench.engine.prime(prime_request(max_new_tokens=room))
    if accepted is None:
        assert [reply.root] == tokens and reply.finished == finished and bench.opened[0].closed
        return
    answer = bench.engine.verify(reply.session, 1, round_request([*PROMPT, 4], [5, 6], [ROOT, 0]))
    assert (answer.tokens, answer.accepted, answer.finished) == (tokens, accepted, finished)


def test_a_first_token_that_stops_finishes_at_once() -> None:
    bench = Bench(model=ForcedModel([STOP_ID], len(PROMPT)))
    reply = bench.engine.prime(prime_request(head_digest=HEAD))
    assert reply.finished == "stop" and reply.handoff is None and bench.opened[0].closed


def test_priming_again_goes_on_where_the_session_was_and_counts_the_cap_from_the_start() -> None:
    bench = Bench()
    plain = bench.model.answer(PROMPT, 12)
    assert len(plain) == 12
    reply = bench.engine.prime(prime_request())
    ids = [*PROMPT, reply.root]
    ids += bench.engine.verify(reply.session, 1, round_request(ids)).tokens
    bench.engine.close(reply.session)
    again = bench.engine.prime(prime_request(prompt=ids, continue_from=2))
    assert again.session != reply.session and again.length == len(ids) + 1
    ids.append(again.root)
    number, finished = 0, again.finished
    while not finished:
        number += 1
        answer = bench.engine.verify(again.session, number, round_request(ids))
        ids += answer.tokens
        finished = answer.finished
    assert ids[len(PROMPT) :] == plain
