"""The prepared head computes what transformers' assisted generation computes, root by root and step by step."""

import numpy as np
import pytest
import torch

from hyco_export.models.capture import teacher_forced
from hyco_export.models.head.unroll import final_norm, head_spans, head_step, pack, response_rows, unroll
from hyco_export.models.verifier import ATTENTION_NAMES
from tests.support import builders

VOCAB = 60
LENGTH, ANSWER_START = 30, 12
WIDE = 1000  # a window longer than any sequence here
STEPS = 4


@pytest.fixture(scope="module")
def verifier():
    return builders.small_verifier(VOCAB)


@pytest.fixture(scope="module")
def head():
    return builders.small_head(VOCAB)


@pytest.fixture(scope="module")
def capture(verifier):
    return teacher_forced(verifier, builders.random_ids(LENGTH, VOCAB), ANSWER_START)


def assisted_step(head, capture, root, depth, state, keys_before):
    """transformers' own forward for one root, fed the sequence's token at root + depth; K/V from `keys_before` on."""
    keys_values = {
        ATTENTION_NAMES[kind]: tuple(
            rows[keys_before:root].transpose(0, 1)[None] for rows in (capture.k[kind], capture.v[kind])
        )
        for kind in ("sliding", "full")
    }
    embedded = torch.cat([capture.e[root + depth], state])[None, None]
    with torch.no_grad():
        output = head(
            inputs_embeds=embedded,
            attention_mask=torch.ones(1, root - keys_before + 1),
            position_ids=torch.tensor([[root]]),
            shared_kv_states=keys_values,
            use_cache=False,
        )
    return output.logits[0, 0], output.last_hidden_state[0, 0]


@pytest.mark.parametrize("window", [WIDE, 4])
def test_every_root_and_step_equals_transformers(head, capture, window):
    with torch.no_grad():
        unrolled = unroll(head, response_rows(capture, head_spans(head.config), window), STEPS)

    assert [len(logits) for logits in unrolled] == [len(capture.roots) - depth for depth in range(STEPS)]
    for row, root in enumerate(capture.roots):
        state = capture.h[root - 1]
        for depth in range(min(STEPS, len(capture.roots) - row)):
            wanted, state = assisted_step(head, capture, root, depth, state, max(0, root - window))
            torch.testing.assert_close(unrolled[depth][row], wanted, atol=1e-5, rtol=0)


def test_rows_do_not_see_each_other(head, capture):
    rows = response_rows(capture, head_spans(head.config), WIDE)
    with torch.no_grad():
        together = head_step(head, rows.embeddings, rows.states, rows).logits
        alone = head_step(head, rows.embeddings[:1], rows.states[:1], rows.select(torch.tensor([0]))).logits
    torch.testing.assert_close(together[:1], alone, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("distance", "seen"), [(1, True), (builders.SLIDING_WINDOW + 1, True), (builders.SLIDING_WINDOW + 2, False)]
)
def test_the_sliding_window_ends_where_transformers_ends_it(head, capture, distance, seen):
    """Sliding layers see the newest window + 1 keys; a row changed at that distance matters, one further does not."""
    root = capture.roots[-1]
    state = capture.h[root - 1]
    changed = {**capture.v, "sliding": capture.v["sliding"].clone()}
    changed["sliding"][root - distance] += 10.0
    moved = type(capture)(capture.ids, capture.answer_start, capture.e, capture.h, capture.k, changed)

    theirs = [assisted_step(head, c, root, 0, state, 0)[0] for c in (capture, moved)]
    with torch.no_grad():
        ours = [unroll(head, response_rows(c, head_spans(head.config), WIDE), 1)[0][-1] for c in (capture, moved)]

    assert torch.equal(*theirs) is not seen
    for left, right in zip(theirs, ours, strict=True):
        torch.testing.assert_close(left, right, atol=1e-5, rtol=0)


def test_the_window_hides_older_keys_from_full_layers(head, capture):
    changed = {**capture.v, "full": capture.v["full"].clone()}
    root, window = capture.roots[-1], 8
    changed["full"][root - window - 1] += 10.0
    moved = type(capture)(capture.ids, capture.answer_start, capture.e, capture.h, capture.k, changed)
    spans = head_spans(head.config)
    with torch.no_grad():
        inside = [unroll(head, response_rows(c, spans, window), 1)[0][-1] for c in (capture, moved)]
        beyond = [unroll(head, response_rows(c, spans, window + 1), 1)[0][-1] for c in (capture, moved)]
    assert torch.equal(*inside)
    assert not torch.equal(*beyond)


def test_states_from_before_the_norm_are_normed_first(verifier, head):
    ids = builders.random_ids(LENGTH, VOCAB)
    spans = head_spans(head.config)
    after = response_rows(teacher_forced(verifier, ids, ANSWER_START, "post"), spans, WIDE)
    before = response_rows(teacher_forced(verifier, ids, ANSWER_START, "pre"), spans, WIDE, final_norm(verifier))
    unnormed = response_rows(teacher_forced(verifier, ids, ANSWER_START, "pre"), spans, WIDE)
    torch.testing.assert_close(before.states, after.states)
    assert not torch.allclose(unnormed.states, after.states)


def test_answers_follow_their_roots(capture, head):
    rows = response_rows(capture, head_spans(head.config), WIDE)
    np.testing.assert_array_equal(rows.answers, capture.ids[ANSWER_START:])


def test_packed_sequences_do_not_see_each_other(verifier, head):
    """Rows of several sequences in one pass give what each sequence gives alone, at every depth."""
    spans = head_spans(head.config)
    lengths = (14, 30, 9)
    parts = [
        response_rows(teacher_forced(verifier, builders.random_ids(length, VOCAB, seed), 7), spans, 8)
        for seed, length in enumerate(lengths)
    ]
    packed = pack(parts)
    with torch.no_grad():
        together = unroll(head, packed, STEPS)
        alone = [unroll(head, part, STEPS) for part in parts]

    assert len(packed) == sum(map(len, parts))
    for depth in range(STEPS):
        wanted = torch.cat([logits[depth] for logits in alone if depth < len(logits)])
        torch.testing.assert_close(together[depth], wanted, atol=1e-5, rtol=0)
        np.testing.assert_array_equal(
            packed.sequences[packed.reaching(depth)],
            np.repeat(range(3), [max(0, len(part) - depth) for part in parts]),
        )


def test_rows_of_a_bfloat16_capture_reach_a_float32_head_and_back(head):
    verifier = builders.small_verifier(VOCAB).to(torch.bfloat16)
    captured = teacher_forced(verifier, builders.random_ids(LENGTH, VOCAB), ANSWER_START)
    rows = response_rows(captured, head_spans(head.config), WIDE)
    for moved in (
        rows.to(torch.float32, head.device),
        rows.to(torch.float32, head.device).to(rows.states.dtype, head.device),
    ):
        for name, mask in moved.masks.items():
            assert torch.isfinite(mask).all()
            assert torch.equal(mask == 0, rows.masks[name] == 0)
    assert torch.isfinite(unroll(head, rows, STEPS)[-1]).all()
