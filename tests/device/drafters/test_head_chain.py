"""The head's chain alone: what it plants, and that it follows the hand-offs."""

import math

import numpy as np

from hyco_export.device.drafters import HeadChainDrafter
from hyco_export.device.interfaces import Given
from hyco_export.device.kv_state import HeadState
from hyco_export.protocol import wire
from hyco_export.protocol.tree import Source
from tests.support.scripted import HANDOFF, STOP_ID, ScriptedHead, ScriptedSession, ToyLanguageModel

EDGE = math.log(0.66)
IDS = [4, 9, 2, 7, 11, 5]
MODEL = ToyLanguageModel(seed=5, stop_bias=-1e9)


def handoff_of(ids: list[int], count: int, model: ToyLanguageModel = MODEL) -> wire.Handoff:
    session = ScriptedSession(model)
    session.prime(np.array(ids[:-1]))
    return session.handoff(ids[-1], count)


def test_the_chain_is_the_heads_and_has_no_siblings() -> None:
    drafter = HeadChainDrafter(HeadState(ScriptedHead(MODEL, error_every=99), HANDOFF), EDGE, {STOP_ID})
    drafter.begin(IDS, Given(handoff_of(IDS, len(IDS) - 1)))
    draft = drafter.propose(IDS)
    expected = MODEL.greedy(IDS, len(draft.tree))
    assert list(draft.tree.tokens) == expected and len(expected) == 4
    assert draft.tree.parents == (-1, 0, 1, 2) and set(draft.tree.sources) == {Source.CHAIN}
    np.testing.assert_allclose(draft.tree.log_probs, EDGE * np.arange(1, 5))
    assert draft.slm_ms == 0.0 < draft.head_ms
    longer = [*IDS, *expected[:2], 3]
    drafter.observe((0, 1), longer, Given(handoff_of(longer, 3)))
    assert list(drafter.propose(longer).tree.tokens) == MODEL.greedy(longer, 4)


def test_nothing_is_drafted_behind_a_stop_token() -> None:
    stopping = ToyLanguageModel(seed=5, stop_bias=1e9)
    drafter = HeadChainDrafter(HeadState(ScriptedHead(stopping, error_every=99), HANDOFF), EDGE, {STOP_ID})
    drafter.begin(IDS, Given(handoff_of(IDS, len(IDS) - 1, stopping)))
    assert drafter.propose(IDS).tree.tokens == (STOP_ID,)
