"""The device's host logic, checked through what its graphs are fed: every slot, mask, position and byte."""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hyco_export.core.encodings import Encoding
from hyco_export.core.keepset import KeepSet, require_keepset
from hyco_export.core.numerics import LOG_SOFTMAX_BOUND, log_softmax
from hyco_export.device.backends import BACKENDS, find_backend, open_head
from hyco_export.device.drafters import HybridDrafter, TreeRule
from hyco_export.device.driver import generate
from hyco_export.device.head import GraphHead
from hyco_export.device.interfaces import Given, Request
from hyco_export.device.kv_state import HeadState
from hyco_export.device.slm import GraphSlm, log_probs_of
from hyco_export.device.tree_builder import SlmState, best_columns
from hyco_export.errors import ArtifactError, HycoError
from hyco_export.protocol import wire
from hyco_export.protocol.tree import ROOT, path_to
from tests.support.scripted import (
    HANDOFF,
    HIDDEN,
    STOP_ID,
    VOCAB_SIZE,
    WINDOW,
    ScriptedServer,
    ScriptedSession,
    ToyLanguageModel,
    toy_e,
    toy_h,
    toy_rows,
)
from tests.support.toy_graphs import (
    KEEP_IDS,
    LOGITS,
    ToyEmbeddings,
    ToyHeadGraph,
    ToySlmGraph,
    toy_head_spec,
    toy_slm_spec,
)

RULE = TreeRule(math.log(0.66), budget=12, candidates_per_row=12)
MODEL = ToyLanguageModel(seed=3, stop_bias=-1e9)


def numbers(length: int, seed: int = 0) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(0, VOCAB_SIZE, length)]


def toy_head(window: int, sliding_span: int | None) -> tuple[GraphHead, ToyHeadGraph]:
    spec = toy_head_spec(window, {"sliding": sliding_span, "full": None})
    graph = ToyHeadGraph(MODEL, spec)
    return GraphHead(spec, KEEP_IDS, graph), graph


def toy_slm(
    rows: int = 8, prefill_rows: int = 5, ring: int = 12, sliding_ring: int = 8, span: int = 8
) -> tuple[GraphSlm, ToySlmGraph, ToySlmGraph]:
    spec = toy_slm_spec(rows, prefill_rows, {"sliding": sliding_ring, "full": ring}, {"sliding": span, "full": None})
    tree, prefill = ToySlmGraph(MODEL, spec, spec.tree), ToySlmGraph(MODEL, spec, spec.prefill)
    return GraphSlm(spec, ToyEmbeddings(), tree, prefill), tree, prefill


def stretch(ids: Sequence[int], start: int, stop: int) -> list[tuple[int, int]]:
    """(position mod 256, token) of positions start .. stop - 1."""
    return [(position, ids[position]) for position in range(max(0, start), stop)]


# ---------------------------------------------------------------------------------------------------------------- head


@pytest.mark.parametrize("context", [1, 2, 7, 8, 9, 15, 16, 17, 40])
@pytest.mark.parametrize("sliding_span", [3, 8, 9, 10, 20])
@pytest.mark.parametrize("chunk", [1, 3, 100])
def test_head_sees_the_newest_window_and_the_span(context: int, sliding_span: int, chunk: int) -> None:
    window, ids = 8, numbers(context + 1)
    head, graph = toy_head(window, sliding_span)
    for start in range(0, context, chunk):
        stop = min(start + chunk, context)
        head.commit(toy_rows(ids[start:stop], start), start)
    head.draft(toy_e(ids[context]), toy_h(ids[:context]), context)
    assert graph.seen["full"] == stretch(ids, context - window, context)
    # the query is the root itself: of `span` positions counted from it, span - 1 lie before it
    assert graph.seen["sliding"] == stretch(ids, max(context - window, context - sliding_span + 1), context)
    assert graph.root == (ids[context], context)
    assert np.array_equal(graph.h, toy_h(ids[:context]))


def test_head_starts_at_the_first_row_it_was_given() -> None:
    ids = numbers(30)
    head, graph = toy_head(8, 10)
    head.commit(toy_rows(ids[20:23], 20), 20)  # a server that keeps fewer positions than the window
    head.draft(toy_e(ids[23]), toy_h(ids[:23]), 23)
    assert graph.seen["full"] == graph.seen["sliding"] == stretch(ids, 20, 23)
    head.reset()
    head.commit(toy_rows(ids[:2], 0), 0)
    head.draft(toy_e(ids[2]), toy_h(ids[:2]), 2)
    assert graph.seen["full"] == stretch(ids, 0, 2)


def test_head_maps_kept_rows_to_ids() -> None:
    ids = numbers(6)
    head, _ = toy_head(8, 10)
    head.commit(toy_rows(ids[:5], 0), 0)
    draft = head.draft(toy_e(ids[5]), toy_h(ids[:5]), 5)
    expected = np.minimum(np.searchsorted(KEEP_IDS, MODEL.greedy(ids, 4)), len(KEEP_IDS) - 1)
    assert draft.chain == tuple(int(KEEP_IDS[row]) for row in expected)
    assert draft.runner_ups == tuple(int(KEEP_IDS[(row + 1) % len(KEEP_IDS)]) for row in expected[:2])
    assert set(draft.chain + draft.runner_ups) <= set(map(int, KEEP_IDS))


# ----------------------------------------------------------------------------------------------------------------- SLM


def check_pass(
    slm: GraphSlm, graph: ToySlmGraph, ids: Sequence[int], first: int, tokens: Sequence[int], parents: Sequence[int]
) -> None:
    """After a tree pass over `tokens` on top of the committed `ids`: what every row saw."""
    length, spec = len(ids), slm.spec
    assert length + len(tokens) < 256, "positions are told from their bytes"
    for row in range(len(tokens)):
        path = [tokens[node] for node in path_to(parents, row)]
        line = [*ids, *path]
        assert graph.positions[row] == len(line) - 1
        in_pass = stretch(line, length, len(line))
        ring_start = max(first, length - spec.rings["full"])
        assert graph.seen["full"][row] == stretch(line, ring_start, length) + in_pass
        span = spec.spans["sliding"]
        assert span is not None
        ring_start = max(first, length - spec.rings["sliding"], len(line) - span)
        pass_start = max(length, len(line) - span)
        assert graph.seen["sliding"][row] == stretch(line, ring_start, length) + stretch(line, pass_start, len(line))
    for row in range(len(tokens), spec.rows):  # padding
        assert graph.seen["full"][row] == graph.seen["sliding"][row] == [(length % 256, 0)]


@pytest.mark.parametrize("length", [0, 1, 4, 5, 6, 7, 8, 9, 11, 12, 13, 25, 61])
@pytest.mark.parametrize("span", [3, 8])
def test_slm_pass_sees_ring_and_ancestors(length: int, span: int) -> None:
    ids = numbers(length)
    slm, tree, prefill = toy_slm(span=span)
    slm.prefill(np.array(ids, np.int64))
    assert slm.length == length
    assert prefill.runs == math.ceil(length / 5)
    tokens, parents = [4, 5, 6, 7, 9], [ROOT, 0, 0, 1, 3]
    log_probs = slm.tree_pass(np.array(tokens), np.array(parents))
    check_pass(slm, tree, ids, 0, tokens, parents)
    for row in range(len(tokens)):
        context = [token for _, token in tree.seen["full"][row]]
        grid = LOGITS.dequantize(LOGITS.quantize(MODEL.logits(context)[KEEP_IDS])).astype(np.float64)
        expected = grid - np.log(np.exp(grid).sum())
        np.testing.assert_allclose(log_probs[row], expected, atol=1e-6)
    assert log_probs.shape == (5, len(KEEP_IDS)) and log_probs.dtype == np.float32


@pytest.mark.parametrize("length", [3, 4, 5, 6, 10, 11, 12, 13, 30])
def test_prefill_passes_see_what_came_before(length: int) -> None:
    ids = numbers(length)
    slm, _, prefill = toy_slm(span=6)
    slm.prefill(np.array(ids, np.int64))
    last_start = (length - 1) // 5 * 5
    for row in range(length - last_start):
        position = last_start + row
        assert prefill.positions[row] == position
        start = max(last_start - 8, position - 5)
        assert prefill.seen["sliding"][row] == stretch(ids, start, position + 1)


def test_committed_rows_stay_where_their_positions_say() -> None:
    ids = numbers(9)
    slm, tree, _ = toy_slm()
    slm.prefill(np.array(ids, np.int64))
    slm.tree_pass(np.array([4, 5, 6, 7]), np.array([ROOT, 0, 0, 2]))
    slm.commit(np.array([0, 2, 3]))
    assert slm.length == 12
    ids += [4, 6, 7]
    slm.tree_pass(np.array([9]), np.array([ROOT]))
    check_pass(slm, tree, ids, 0, [9], [ROOT])
    assert tree.ring["full"] == stretch(ids, 0, 12)
    assert tree.ring["sliding"] == [*stretch(ids, 8, 12), *stretch(ids, 4, 8)]  # slot = position mod 8


def test_rows_of_several_passes_are_committed_as_one_path() -> None:
    ids = numbers(9)
    slm, tree, _ = toy_slm()
    slm.prefill(np.array(ids, np.int64))
    slm.tree_pass(np.array([4, 5]), np.array([ROOT, 0]))
    assert slm.next_row == 2
    slm.tree_pass(np.array([4, 5, 7, 6]), np.array([ROOT, 0, 1, 1]))  # ancestors again, then two new rows
    slm.commit(np.array([0, 3, 5]))  # 4 of the first pass, 5 and 6 of the second
    ids += [4, 5, 6]
    slm.tree_pass(np.array([9]), np.array([ROOT]))
    check_pass(slm, tree, ids, 0, [9], [ROOT])
    assert tree.ring["full"] == stretch(ids, 0, 12)
    slm.forget(before=6)
    with pytest.raises(ValueError, match="row 5 belongs to no pass"):
        slm.commit(np.array([5]))
    slm.commit(np.array([6]))
    assert slm.length == 13


@pytest.mark.parametrize("start", [1, 5, 23])
def test_reset_to_a_position_leaves_earlier_ones_unseen(start: int) -> None:
    ids = numbers(start + 10)
    slm, tree, _ = toy_slm()
    slm.prefill(np.array(numbers(9, seed=1), np.int64))  # another text before it
    slm.reset(start)
    slm.prefill(np.array(ids[start : start + 4], np.int64))
    slm.tree_pass(np.array([2, 4]), np.array([ROOT, 0]))
    check_pass(slm, tree, ids[: start + 4], start, [2, 4], [ROOT, 0])
    assert sum(entry is not None for entry in tree.ring["full"]) == 4


def test_slm_refuses_more_rows_than_a_pass_has() -> None:
    slm, _, _ = toy_slm(rows=3)
    with pytest.raises(ValueError, match="4 rows, a pass of this SLM has 3"):
        slm.tree_pass(np.zeros(4, np.int64), np.full(4, ROOT))


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_slm_rings_follow_any_history(data: st.DataObject) -> None:
    slm, tree, _ = toy_slm(rows=6, ring=10, sliding_ring=7, span=data.draw(st.integers(1, 7)))
    first = data.draw(st.integers(0, 30))
    slm.reset(first)
    ids = numbers(first, seed=9)
    token = st.integers(0, VOCAB_SIZE - 1)
    for _ in range(data.draw(st.integers(1, 6))):
        if data.draw(st.booleans()):
            chunk = data.draw(st.lists(token, min_size=1, max_size=23))
            slm.prefill(np.array(chunk))
            ids += chunk
        tokens = data.draw(st.lists(token, min_size=1, max_size=6))
        parents = [data.draw(st.integers(ROOT, row - 1)) if row else ROOT for row in range(len(tokens))]
        number = slm.next_row
        slm.tree_pass(np.array(tokens), np.array(parents))
        check_pass(slm, tree, ids, first, tokens, parents)
        path = path_to(parents, data.draw(st.integers(0, len(tokens) - 1)))
        slm.commit(number + np.array(path))
        ids += [tokens[row] for row in path]
        assert slm.length == len(ids)


def test_log_probabilities_sum_to_one_at_paper_size_and_rank_as_the_integers_do() -> None:
    encoding = Encoding("uint16", float(np.float32(60 / 65_535)), 30_000)
    integers = np.random.default_rng(0).normal(30_000, 5_000, (2, 86_089)).astype(np.uint16)
    found = log_probs_of(integers, encoding)
    assert found.dtype == np.float32 and found.shape == integers.shape
    np.testing.assert_allclose(np.exp(found.astype(np.float64)).sum(axis=1), 1.0, atol=1e-5)
    span = encoding.scale * float(np.ptp(integers.astype(np.int64), axis=1).max())
    assert np.abs(found - log_softmax(encoding.dequantize(integers))).max() <= LOG_SOFTMAX_BOUND * (1 + span)
    for row, wanted in zip(found, integers.astype(np.int64), strict=True):
        assert np.array_equal(best_columns(row, 32), np.argsort(-wanted, kind="stable")[:32])


# --------------------------------------------------------------------------------------------------- the whole device


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 1 << 30), prompt_length=st.integers(1, 40), sliding_span=st.integers(2, 12))
def test_greedy_text_is_plain_greedy_through_both_graphs(seed: int, prompt_length: int, sliding_span: int) -> None:
    model = ToyLanguageModel(seed=3, stop_bias=0.0)
    prompt = [2 + token % (VOCAB_SIZE - 2) for token in numbers(prompt_length, seed)]
    head, head_graph = toy_head(WINDOW, sliding_span)
    slm, tree_graph, _ = toy_slm(rows=8)
    drafter = HybridDrafter(HeadState(head, HANDOFF), SlmState(slm, KEEP_IDS, {STOP_ID}), RULE)
    request = Request("hyco", "p", wire.Sampling(0.0, 64, 0.95), wire.EXACT, 1, 30)
    trace = generate(prompt, request, drafter, ScriptedServer(model))
    assert list(trace.tokens) == model.answer(prompt, 30)
    if trace.rounds:
        last = trace.rounds[-1]
        committed = [*prompt, *trace.tokens][: last.length]
        root = last.length - 1
        assert head_graph.seen["full"] == [(p % 256, committed[p]) for p in range(max(0, root - WINDOW), root)]
        # the row of the root in the SLM's pass sees what is committed, up to its ring
        row = tree_graph.positions.index(root)
        start = max(0, root - row - slm.spec.rings["full"])
        assert tree_graph.seen["full"][row] == [(p % 256, committed[p]) for p in range(start, root + 1)]


def test_a_right_draft_is_accepted_whole_while_the_window_holds_the_context() -> None:
    prompt = [4, 6]
    head, _ = toy_head(WINDOW, None)
    slm, _, _ = toy_slm(rows=8)
    drafter = HybridDrafter(HeadState(head, HANDOFF), SlmState(slm, np.array(KEEP_IDS), {STOP_ID}), RULE)
    request = Request("hyco", "p", wire.Sampling(0.0, 64, 0.95), wire.EXACT, 1, 7)
    trace = generate(prompt, request, drafter, ScriptedServer(MODEL))
    answer = MODEL.answer(prompt, 7)
    assert set(answer[1:6]) <= set(map(int, KEEP_IDS)), "choose another seed: the chain must be draftable"
    # four chain tokens, the SLM's best child under them (the same model: always right), the bonus
    assert trace.rounds[0].tokens == tuple(answer[1:7])


def test_handoff_of_a_server_session_fits_the_head() -> None:
    ids = numbers(20)
    session = ScriptedSession(MODEL)
    session.prime(np.array(ids[:-1]))
    head, graph = toy_head(WINDOW, 4)
    feed = HeadState(head, HANDOFF)
    feed.begin(ids, Given(session.handoff(ids[-1], WINDOW)))
    feed.draft()
    assert graph.seen["full"] == stretch(ids, 19 - WINDOW, 19)
    assert graph.h.shape == (HIDDEN,)


# ----------------------------------------------------------------------------------------------------------- back ends


def test_unknown_back_end_lists_the_known_ones() -> None:
    with pytest.raises(HycoError, match=r"unknown device back end 'gpu' \(known ones: torch \(.*onnx-cpu \(.*qnn \("):
        find_backend("gpu")
    assert list(BACKENDS) == ["torch", "onnx-cpu", "qnn"]


def test_a_run_folder_without_artifacts_names_the_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"head\.json"):
        open_head(tmp_path, "onnx-cpu")


def test_artifacts_of_another_keep_set_are_refused() -> None:
    with pytest.raises(ArtifactError, match=r"convert-slm was built with keep set 0123.*hyco-export convert-slm"):
        require_keepset("convert-slm", "0123456789abcdef", KeepSet(np.array([1, 2, 3]), 8))
