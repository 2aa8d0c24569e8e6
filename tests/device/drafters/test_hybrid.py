"""Feeds and drafters one by one: what the models are told, and what must be refused."""

import math

import msgspec
import numpy as np
import pytest

from hyco_export.device.drafters import HybridDrafter, NullDrafter, TreeRule
from hyco_export.device.interfaces import Given
from hyco_export.device.kv_state import HeadState
from hyco_export.device.tree_builder import SlmState, plant
from hyco_export.errors import ProtocolError
from hyco_export.protocol import wire
from hyco_export.protocol.tree import EMPTY_TREE, ROOT, Source, check_tree
from tests.support.oracle import OracleDrafter
from tests.support.scripted import (
    HANDOFF,
    HIDDEN,
    STOP_ID,
    VOCAB_SIZE,
    WINDOW,
    ScriptedHead,
    ScriptedSession,
    ScriptedSlm,
)
from tests.support.scripted import ToyLanguageModel as Model

MODEL = Model(seed=5, stop_bias=-1e9)
KEEP = np.arange(VOCAB_SIZE)
EDGE = math.log(0.66)
IDS = [4, 9, 2, 7, 11, 5]


def handoff_of(ids: list[int], count: int) -> wire.Handoff:
    session = ScriptedSession(MODEL)
    session.prime(np.array(ids[:-1]))
    return session.handoff(ids[-1], count)


def log_probs_after(ids: list[int]) -> np.ndarray:
    logits = MODEL.logits(ids).astype(np.float64)
    return logits - np.log(np.exp(logits).sum())


# ------------------------------------------------------------------------------------------------------------ SlmState


@pytest.mark.parametrize(("behind", "prefills"), [(0, 1), (1, 1), (5, 1), (6, 2), (9, 2)])
def test_catch_up_rides_in_the_pass_as_long_as_it_fits(behind: int, prefills: int) -> None:
    slm = ScriptedSlm(MODEL, KEEP, rows=8)  # root and two planted nodes leave room for 5
    feed = SlmState(slm, KEEP, {STOP_ID})
    feed.begin(IDS)
    ids = [*IDS, *range(2, 2 + behind)]
    planted = plant([3, 8], [], EDGE)
    base = feed.base(ids, len(planted))
    log_probs, base_rows, rows = feed.forward(base, planted, (ROOT, 0, 1))
    for row, context in enumerate((ids, [*ids, 3], [*ids, 3, 8])):
        np.testing.assert_allclose(log_probs[row], log_probs_after(context), atol=1e-5)
    assert len(slm.prefilled) == prefills
    assert slm.widths == [3 + (behind if prefills == 1 else 0)]
    feed.commit([*base_rows, rows[1]])
    assert slm.tokens == [*ids, 3]


def test_prefill_is_bounded_by_the_ring_and_positions_stay_absolute() -> None:
    slm = ScriptedSlm(MODEL, KEEP, context=4)
    SlmState(slm, KEEP, {STOP_ID}).begin(IDS)
    assert (slm.first, slm.tokens, slm.length) == (1, IDS[1:5], 5)


# ----------------------------------------------------------------------------------------------------------- HeadState


def test_head_gets_the_newest_handoff() -> None:
    head = ScriptedHead(MODEL)
    feed = HeadState(head, HANDOFF)
    feed.begin(IDS, Given(handoff_of(IDS, 5)))
    assert head.tokens == dict(enumerate(IDS[:-1]))
    longer = [*IDS, 6, 8, 3]
    feed.observe(longer, Given(handoff_of(longer, 3)))
    assert head.tokens == dict(enumerate(longer[:-1]))
    feed.draft()  # checks e, h and the ring's end itself


@pytest.mark.parametrize(
    ("changes", "code", "words"),
    [
        ({"e": b"\0"}, "handoff_size", f"e of 1 B and h of {HIDDEN} B, the head takes {HIDDEN} B each"),
        ({"h": b""}, "handoff_size", "h of 0 B"),
        ({"kv": b"\0" * (HANDOFF.row_bytes + 1)}, "handoff_size", "not a multiple of"),
        ({"first_position": 4}, "handoff_gap", "positions 4 to 6, expected 5 to 7"),
        ({"first_position": 6}, "handoff_gap", "positions 6 to 8, expected 5 to 7"),
        ({"kv": b"\0" * HANDOFF.row_bytes}, "handoff_gap", "positions 5 to 5, expected 5 to 7"),
    ],
)
def test_a_handoff_that_does_not_fit_is_refused(changes: dict[str, object], code: str, words: str) -> None:
    feed = HeadState(ScriptedHead(MODEL), HANDOFF)
    feed.begin(IDS, Given(handoff_of(IDS, 5)))
    longer = [*IDS, 6, 8, 3]
    with pytest.raises(ProtocolError, match=words) as refusal:
        feed.observe(longer, Given(msgspec.structs.replace(handoff_of(longer, 3), **changes)))
    assert refusal.value.code == code


def test_a_whole_window_of_rows_may_skip_positions() -> None:
    head = ScriptedHead(MODEL)
    feed = HeadState(head, HANDOFF)
    feed.begin(IDS, Given(handoff_of(IDS, 5)))
    longer = [*IDS, *range(WINDOW + 2)]
    feed.observe(longer, Given(handoff_of(longer, WINDOW)))
    assert max(head.tokens) == len(longer) - 2


# ----------------------------------------------------------------------------------------------------------- drafters


def test_hybrid_tree_is_made_of_all_three_sources() -> None:
    head, slm = ScriptedHead(MODEL, error_every=2), ScriptedSlm(MODEL, KEEP)
    drafter = HybridDrafter(HeadState(head, HANDOFF), SlmState(slm, KEEP, {STOP_ID}), TreeRule(EDGE, 16, 16))
    drafter.begin(IDS, Given(handoff_of(IDS, 5)))
    tree = drafter.propose(IDS).tree
    check_tree(tree.tokens, tree.parents, VOCAB_SIZE, 16)
    assert [tree.sources.count(source) for source in Source] == [4, 2, 10]
    best = int(np.argmax(log_probs_after(IDS)))
    place = [row for row in range(16) if (tree.tokens[row], tree.parents[row]) == (best, ROOT)]
    assert len(place) == 1
    # the runner-up is the model's own choice where the chain is wrong, so the SLM's equal candidate was dropped
    assert tree.sources[place[0]] in (Source.CHAIN, Source.RUNNER_UP)


def test_budget_smaller_than_the_planted_nodes_still_commits_the_right_rows() -> None:
    head, slm = ScriptedHead(MODEL, error_every=99), ScriptedSlm(MODEL, KEEP)
    drafter = HybridDrafter(HeadState(head, HANDOFF), SlmState(slm, KEEP, {STOP_ID}), TreeRule(EDGE, 3, 3))
    drafter.begin(IDS, Given(handoff_of(IDS, 5)))
    tree = drafter.propose(IDS).tree
    assert tree.sources[:2] == (Source.CHAIN, Source.CHAIN)
    ids = [*IDS, tree.tokens[0], tree.tokens[1], 6]
    drafter.observe([0, 1], ids, Given(handoff_of(ids, 3)))
    assert slm.tokens == ids[:-1]


def test_null_drafter_has_nothing_to_say() -> None:
    drafter = NullDrafter()
    drafter.begin(IDS, Given())
    drafter.observe([], IDS, Given())
    assert drafter.propose(IDS).tree == EMPTY_TREE


def test_oracle_drafter_proposes_one_chain() -> None:
    tree = OracleDrafter(MODEL.greedy, 3).propose(IDS).tree
    assert tree.tokens == tuple(MODEL.greedy(IDS, 3))
    assert tree.parents == (ROOT, 0, 1)
