"""An SLM of another vocabulary behind verifier ids: every row is answered as if its whole text had been read anew."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hyco_export.core.token_bridge import TokenBridge
from hyco_export.device.drafters import HybridDrafter, SpecEdgeDrafter, TreeRule
from hyco_export.device.driver import generate
from hyco_export.device.interfaces import Request
from hyco_export.device.kv_state import HeadState
from hyco_export.device.slm import BridgedSlm
from hyco_export.device.tree_builder import SlmState
from hyco_export.protocol import wire
from hyco_export.protocol.tree import ROOT, Source, path_to
from tests.support.scripted import HANDOFF, ScriptedHead, ScriptedServer, ScriptedSlm, ToyLanguageModel

VERIFIER_SIZE, OWN_SIZE, ROWS = 16, 12, 8
MAPPED = {9: 1, 4: 3, 11: 4, 2: 7, 7: 10}  # verifier id -> the SLM's; 9 and 4 are out of order
SPELLED = {0: [2, 2], 1: [0, 5, 6], 3: [8] * 5, 5: [9, 11], 6: [2] * 20}  # the longest needs three passes


def make_bridge() -> TokenBridge:
    pieces = [SPELLED.get(token, [MAPPED.get(token, token % OWN_SIZE)]) for token in range(VERIFIER_SIZE)]
    pairs = sorted((own, token) for token, own in MAPPED.items())
    return TokenBridge(
        verifier_ids=np.array([token for _, token in pairs]),
        drafter_ids=np.array([own for own, _ in pairs]),
        offsets=np.concatenate([[0], np.cumsum([len(own) for own in pieces])]),
        pieces=np.concatenate([np.array(own) for own in pieces]),
    )


BRIDGE = make_bridge()
MODEL = ToyLanguageModel(OWN_SIZE, seed=3)


def make_slm() -> tuple[BridgedSlm, ScriptedSlm]:
    own = ScriptedSlm(MODEL, BRIDGE.drafter_ids, rows=ROWS)
    return BridgedSlm(own, BRIDGE), own


def expected(text: list[int]) -> np.ndarray:
    """log q [C] after a text of verifier ids, read whole."""
    logits = MODEL.logits([int(own) for own in BRIDGE.read_all(text)])[BRIDGE.drafter_ids].astype(np.float64)
    return (logits - np.log(np.exp(logits).sum())).astype(np.float32)


tokens_of = st.lists(st.integers(0, VERIFIER_SIZE - 1), min_size=1, max_size=6)


@st.composite
def forests(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """A root and a few nodes under it."""
    tokens = draw(tokens_of)
    return tokens, [ROOT, *(draw(st.integers(0, row - 1)) for row in range(1, len(tokens)))]


@settings(max_examples=200, deadline=None)
@given(tokens_of, st.lists(forests(), min_size=1, max_size=4), st.randoms(use_true_random=False))
def test_rows_are_answered_as_if_their_text_was_read_anew(text, trees, chance):
    slm, own = make_slm()
    slm.prefill(np.array(text))
    committed = list(text)
    for tokens, parents in trees:
        first = slm.next_row
        found = slm.tree_pass(np.array(tokens), np.array(parents))
        assert own.widths[-1] <= ROWS
        forwarded = []
        for row in range(len(tokens)):
            path = path_to(parents, row)
            line = [tokens[node] for node in path]
            if np.allclose(found[row], -np.log(len(MAPPED))):
                assert len(BRIDGE.read_all(tokens[: row + 1])) > ROWS, "a row that fits was left out"
                continue
            assert np.array_equal(found[row], expected([*committed, *line]))
            forwarded.append(path)
        path = chance.choice(forwarded)
        slm.commit(np.array([first + row for row in path]))
        committed += [tokens[row] for row in path]
        assert slm.length == len(committed)
        assert own.tokens == BRIDGE.read_all(committed).tolist()
        slm.forget(slm.next_row)


def test_the_root_of_a_pass_is_always_answered_however_long_its_spelling():
    slm, own = make_slm()
    slm.prefill(np.array([9]))
    assert not slm.fits(np.array([6]), 0)
    for _ in range(2):  # asked twice before it is committed
        first = slm.next_row
        assert np.array_equal(slm.tree_pass(np.array([6]), np.array([ROOT]))[0], expected([9, 6]))
    slm.commit(np.array([first]))
    assert own.tokens == BRIDGE.read_all([9, 6]).tolist()
    assert slm.length == 2


def test_a_path_is_kept_as_far_as_it_was_forwarded():
    slm, own = make_slm()
    slm.prefill(np.array([9]))
    slm.tree_pass(np.array([4, 3, 3]), np.array([ROOT, 0, 1]))  # 1 + 5 pieces, then 5 more that do not fit
    slm.commit(np.array([0, 1, 2]))
    assert (slm.length, own.tokens) == (3, BRIDGE.read_all([9, 4, 3]).tolist())
    slm.prefill(np.array([3]))
    assert own.tokens == BRIDGE.read_all([9, 4, 3, 3]).tolist()


@pytest.mark.parametrize("system", ["hybrid", "specedge"])
@pytest.mark.parametrize("seed", range(4))
def test_greedy_text_is_the_verifiers_own(system, seed):
    verifier = ToyLanguageModel(VERIFIER_SIZE, seed=seed)
    slm, _ = make_slm()
    rule = TreeRule(np.log(0.66), 12, 4, passes=1 if system == "hybrid" else 4)
    if system == "hybrid":
        head = HeadState(ScriptedHead(verifier), HANDOFF)
        drafter = HybridDrafter(head, SlmState(slm, BRIDGE.verifier_ids, frozenset({1})), rule)
    else:
        drafter = SpecEdgeDrafter(SlmState(slm, BRIDGE.verifier_ids, frozenset({1})), rule)
    sampling, acceptance = wire.Sampling(0.0, 0, 1.0), wire.Acceptance("exact", 1.0)
    digest = "h" if system == "hybrid" else ""
    request = Request("x", "p", sampling, acceptance, seed, 40, head_digest=digest)
    prompt = [4, 9, 2, 7, 11, 5]
    trace = generate(prompt, request, drafter, ScriptedServer(verifier))
    assert list(trace.tokens) == verifier.answer(prompt, 40)
    nodes = [node for record in trace.rounds for node in zip(record.tree.tokens, record.tree.sources, strict=True)]
    proposed = {token for token, source in nodes if source == Source.SLM}
    assert proposed and proposed <= set(MAPPED)
