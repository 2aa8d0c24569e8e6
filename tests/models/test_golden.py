"""Which positions become golden, and what transformers' head drafts there step by step."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hyco_export.core.encodings import encoding_from_range
from hyco_export.core.golden import SHOWN_LOGITS
from hyco_export.models.capture import teacher_forced
from hyco_export.models.golden import PlannedSession, chain_logits, choose_sessions, golden_root, load_stored, received
from hyco_export.models.head.quantisers import LayerGrid, linear_weights, nearest_on
from hyco_export.models.head.stored import stored_name
from hyco_export.models.head.unroll import head_spans, response_rows, unroll
from tests.support import builders

VOCAB, LENGTH, START, STEPS = 60, 30, 10, 3


@pytest.fixture(scope="module")
def capture():
    verifier = builders.small_verifier(VOCAB)
    return teacher_forced(verifier, builders.random_ids(LENGTH, VOCAB), START)


@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(1, 150)), min_size=1, max_size=12),
    st.integers(2, 80),
    st.integers(1, 6),
)
def test_every_root_has_a_prefix_and_room_for_a_chain(texts, window, steps):
    texts = [(start, start + more) for start, more in texts]
    for session in choose_sessions(texts, window, steps):
        start, tokens = texts[session.text]
        roots = session.roots(steps)
        assert roots[0] >= max(1, start)
        assert roots[-1] + steps + 1 < tokens  # the token that might be a stop is never sent
        assert np.all(np.diff(roots) == steps + 1)


def test_long_texts_cross_the_window_by_rounds_and_by_prime():
    sessions = choose_sessions([(20, 140), (20, 60), (25, 130), (30, 50)], 64, 4)
    crossing = [session for session in sessions if session.roots(4)[0] < 64 < session.roots(4)[-1]]
    beyond = [session for session in sessions if session.roots(4)[0] > 64 + 4]
    assert {session.text for session in crossing} == {session.text for session in beyond} == {0, 2}
    assert {session.text for session in sessions} == {0, 1, 2, 3}


def test_texts_that_are_too_short_give_nothing():
    assert choose_sessions([(10, 12)], 64, 4) == []
    assert PlannedSession(0, 7, 2).roots(3) == [7, 11, 15]


def test_stored_weights_replace_the_tied_table_too(capture):
    head = builders.small_head(VOCAB)
    weights = linear_weights(head)
    matrices = nearest_on(weights, dict.fromkeys(weights, LayerGrid(4)))
    assert head.get_input_embeddings().weight is head.lm_head.weight
    load_stored(head, {stored_name(name): matrix for name, matrix in matrices.items()})
    for name, weight in linear_weights(head).items():
        np.testing.assert_array_equal(weight.numpy(), matrices[name].real())
    assert head.get_input_embeddings().weight is head.lm_head.weight  # one table in memory, not two


@pytest.mark.parametrize("window", [100, 4])
def test_the_first_step_is_the_unrolled_heads(capture, window):
    head = builders.small_head(VOCAB)
    rows = response_rows(capture, head_spans(head.config), window)
    with torch.no_grad():
        wanted = unroll(head, rows, 1)[0]
    for row, root in enumerate(capture.roots):
        found = chain_logits(head, capture, root, window, 1, None, lambda _: torch.zeros(builders.HIDDEN), None)
        torch.testing.assert_close(found[0], wanted[row], atol=1e-5, rtol=0)


def test_steps_are_fed_their_own_best_token_and_state(capture):
    head = builders.small_head(VOCAB)
    fed: list[int] = []

    def embed(token: int) -> torch.Tensor:
        fed.append(token)
        return torch.full((builders.HIDDEN,), token / VOCAB)

    kept = torch.arange(0, VOCAB, 2)
    logits = chain_logits(head, capture, 15, 100, STEPS, None, embed, kept)
    assert fed == [int(kept[step.argmax()]) for step in logits]
    again = chain_logits(head, capture, 15, 100, STEPS, None, lambda _: torch.zeros(builders.HIDDEN), kept)
    assert torch.equal(logits[0], again[0]) and not torch.allclose(logits[1], again[1])
    root = golden_root(15, kept.numpy(), logits, [int(capture.ids[16]), 0, 0], capture.ids.tolist())
    assert root.chain == tuple(fed) and root.server_accepted == 1
    assert [len(step) for step in root.top] == [SHOWN_LOGITS] * STEPS
    assert all(list(step) == sorted(step, reverse=True) for step in root.logits)


def test_received_values_are_those_of_the_encodings(capture):
    encodings = {name: encoding_from_range(-3, 3, "uint8") for name in capture.handoff_tensors()}
    for name, values in received(capture, encodings).handoff_tensors().items():
        np.testing.assert_array_equal(
            encodings[name].quantize(values.numpy()), encodings[name].quantize(capture.handoff_tensors()[name].numpy())
        )
        assert len(np.unique(values)) <= 256
