"""Trees that need several SLM passes, against references that forward every node by itself from its whole context."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hyco_export.device.drafters import Drafter, HybridDrafter, SpecEdgeDrafter, TreeRule
from hyco_export.device.driver import generate
from hyco_export.device.interfaces import Given, Request
from hyco_export.device.kv_state import HeadState
from hyco_export.device.tree_builder import SlmState, TreeBuilder, plant
from hyco_export.protocol import wire
from hyco_export.protocol.tree import Tree, check_tree, path_to
from tests.support.scripted import (
    HANDOFF,
    STOP_ID,
    VOCAB_SIZE,
    ScriptedHead,
    ScriptedServer,
    ScriptedSession,
    ScriptedSlm,
)
from tests.support.scripted import ToyLanguageModel as Model

IDS = [4, 9, 2, 7, 11, 5]
Path = tuple[int, ...]
Scores = dict[Path, float]


def log_q(model: Model, keep: np.ndarray, context: list[int]) -> np.ndarray:
    logits = model.logits(context)[keep].astype(np.float64)
    return (logits - np.log(np.exp(logits).sum())).astype(np.float32)


def children(model: Model, keep: np.ndarray, path: Path, score: float, rule: TreeRule) -> Scores:
    values = log_q(model, keep, [*IDS, *path])
    best = np.argsort(-values, kind="stable")[: rule.candidates_per_row]
    return {(*path, int(keep[column])): score + rule.edge_log_prob + float(values[column]) for column in best}


def best_nodes(nodes: Scores, budget: int) -> Scores:
    """The best ones; ties are not expected of random scores."""
    ranked = sorted(nodes, key=lambda path: (-nodes[path], len(path)))
    return {path: nodes[path] for path in ranked[:budget]}


def specedge_reference(model: Model, keep: np.ndarray, rule: TreeRule, passes: int) -> Scores:
    """HyCo §4.2 and runtime.md by the letter, without rows, rings or masks."""
    nodes: Scores = {}
    expanded: set[Path] = set()
    for _ in range(passes):
        frontier = [()] if not expanded else [p for p in nodes if p not in expanded and p[-1] != STOP_ID]
        grown = dict(nodes)
        for path in frontier:
            expanded.add(path)
            grown |= children(model, keep, path, nodes.get(path, 0.0), rule)
        kept = best_nodes(grown, rule.budget)
        if kept == nodes or not frontier:
            break
        nodes = kept
    return nodes


def two_pass_reference(model: Model, keep: np.ndarray, rule: TreeRule, planted: Tree) -> Scores:
    nodes = {tokens_to(planted, row): planted.log_probs[row] for row in range(len(planted))}
    expanded = {(), *nodes}
    for path in [(), *nodes]:
        if not path or path[-1] != STOP_ID:
            for child, score in children(model, keep, path, nodes.get(path, 0.0), rule).items():
                nodes.setdefault(child, score)
    nodes = best_nodes(nodes, rule.budget)
    for path in [p for p in nodes if p not in expanded and p[-1] != STOP_ID]:
        nodes |= children(model, keep, path, nodes[path], rule)
    return best_nodes(nodes, rule.budget)


def tokens_to(tree: Tree, row: int) -> Path:
    return tuple(tree.tokens[node] for node in path_to(tree.parents, row))


def as_scores(tree: Tree) -> Scores:
    return {tokens_to(tree, row): tree.log_probs[row] for row in range(len(tree))}


def assert_same(found: Tree, expected: Scores) -> None:
    check_tree(found.tokens, found.parents, VOCAB_SIZE, 64)
    assert set(as_scores(found)) == set(expected)
    for path, score in as_scores(found).items():
        assert score == pytest.approx(expected[path], abs=1e-5)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 1 << 30),
    budget=st.integers(1, 16),
    per_row=st.integers(1, 8),
    passes=st.integers(1, 5),
    edge=st.sampled_from([0.9, 0.5]),
)
def test_specedge_grows_the_tree_of_its_definition(
    seed: int, budget: int, per_row: int, passes: int, edge: float
) -> None:
    model, keep = Model(seed=seed), np.array([t for t in range(VOCAB_SIZE) if t % 5 != 3])
    rule = TreeRule(math.log(edge), budget, per_row, passes=passes)
    slm = ScriptedSlm(model, keep, rows=16)  # the whole tree fits into a pass once the root is in the rings
    drafter = SpecEdgeDrafter(SlmState(slm, keep, {STOP_ID}), rule)
    drafter.begin(IDS, Given())
    tree = drafter.propose(IDS).tree
    assert_same(tree, specedge_reference(model, keep, rule, passes))
    assert slm.tokens == IDS and len(slm.widths) <= passes


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 1 << 30), budget=st.integers(6, 16), error_every=st.integers(1, 4))
def test_a_second_pass_gives_every_surviving_candidate_its_children(seed: int, budget: int, error_every: int) -> None:
    model, keep = Model(seed=seed), np.arange(VOCAB_SIZE)
    rule = TreeRule(math.log(0.66), budget, 8, passes=2)
    slm = ScriptedSlm(model, keep, rows=16)
    head = HeadState(ScriptedHead(model, error_every=error_every), HANDOFF)
    drafter = HybridDrafter(head, SlmState(slm, keep, {STOP_ID}), rule)
    session = ScriptedSession(model)
    session.prime(np.array(IDS[:-1]))
    drafter.begin(IDS, Given(session.handoff(IDS[-1], 5)))
    tree = drafter.propose(IDS).tree
    head_draft = head.draft()
    planted = plant(head_draft.chain, head_draft.runner_ups, rule.edge_log_prob, {STOP_ID})
    assert_same(tree, two_pass_reference(model, keep, rule, planted))


def test_a_pass_that_is_too_small_forwards_the_best_nodes_that_fit() -> None:
    model, keep = Model(seed=5, stop_bias=-1e9), np.arange(VOCAB_SIZE)
    rule = TreeRule(math.log(0.9), 16, 6, passes=2)
    slm = ScriptedSlm(model, keep, rows=5)
    drafter = SpecEdgeDrafter(SlmState(slm, keep, {STOP_ID}), rule)
    drafter.begin(IDS, Given())
    tree = drafter.propose(IDS).tree
    assert slm.widths == [1, 5]
    first = best_nodes(children(model, keep, (), 0.0, rule), 16)
    grown = dict(first)
    for path in sorted(first, key=lambda p: -first[p])[:5]:
        grown |= children(model, keep, path, first[path], rule)
    assert_same(tree, best_nodes(grown, 16))


def test_it_stops_when_no_child_beats_the_last_node() -> None:
    model, keep = Model(seed=5), np.arange(VOCAB_SIZE)
    slm = ScriptedSlm(model, keep, rows=16)
    rule = TreeRule(math.log(0.001), 4, 8, passes=9)  # an edge costs more than any sibling's distance
    drafter = SpecEdgeDrafter(SlmState(slm, keep, {STOP_ID}), rule)
    drafter.begin(IDS, Given())
    assert len(drafter.propose(IDS).tree) == 4
    assert len(slm.widths) == 2  # the second pass changed nothing


def test_rows_of_different_passes_are_committed_together() -> None:
    model, keep = Model(seed=5, stop_bias=-1e9), np.arange(VOCAB_SIZE)
    slm = ScriptedSlm(model, keep, rows=16)
    drafter = SpecEdgeDrafter(SlmState(slm, keep, {STOP_ID}), TreeRule(math.log(0.9), 16, 2, passes=4))
    drafter.begin(IDS, Given())
    tree = drafter.propose(IDS).tree
    deepest = max(range(len(tree)), key=lambda row: len(path_to(tree.parents, row)))
    path = path_to(tree.parents, deepest)
    assert len(path) == 4
    drafter.observe(path, [*IDS, *tokens_to(tree, deepest), 6], Given())
    # the leaf was never forwarded: it is caught up with in the next pass
    assert slm.tokens == [*IDS, *tokens_to(tree, deepest)[:3]]
    assert slm.contexts == {}


def test_a_root_that_is_in_the_rings_is_not_forwarded_again() -> None:
    model, keep = Model(seed=5), np.arange(VOCAB_SIZE)
    builder = TreeBuilder(SlmState(ScriptedSlm(model, keep), keep, {STOP_ID}), ())
    with pytest.raises(RuntimeError, match="in the rings already"):
        builder.forward((-1,))


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 1 << 30),
    prompt_length=st.integers(1, 12),
    rows=st.integers(8, 14),
    context=st.sampled_from([3, 6, 1 << 20]),
    kind=st.sampled_from(["specedge", "hyco-2p"]),
)
def test_greedy_text_is_plain_greedy(seed: int, prompt_length: int, rows: int, context: int, kind: str) -> None:
    model = Model(seed=seed, stop_bias=0.0)
    prompt = [int(t) for t in np.random.default_rng(seed).integers(2, VOCAB_SIZE, prompt_length)]
    keep = np.array([token for token in range(VOCAB_SIZE) if token % 5 != 3])
    slm = ScriptedSlm(model, keep, rows, context)
    rule = TreeRule(math.log(0.66), 12, 6, passes=4 if kind == "specedge" else 2)
    drafter: Drafter
    if kind == "specedge":
        drafter = SpecEdgeDrafter(SlmState(slm, keep, {STOP_ID}), rule)
    else:
        drafter = HybridDrafter(HeadState(ScriptedHead(model), HANDOFF), SlmState(slm, keep, {STOP_ID}), rule)
    request = Request(kind, "p", wire.Sampling(0.0, 64, 0.95), wire.EXACT, 7, 30)
    trace = generate(prompt, request, drafter, ScriptedServer(model))
    assert list(trace.tokens) == model.answer(prompt, 30)
    assert slm.tokens == [*prompt, *trace.tokens][slm.first : slm.length]
