"""Budgets by price: what is expected of a tree, what is learnt, and what a cut tree costs on synthetic curves."""

import math
from collections.abc import Sequence

import msgspec
import numpy as np
import pytest

from hyco_export.core.recipe import Drafting, Price
from hyco_export.device.budget import PRIOR, Calibration, PricedBudget, expected_accepted, priced_budget
from hyco_export.device.driver import generate
from hyco_export.device.systems import find_system, make_drafter, make_request
from hyco_export.protocol.trace import GenerationTrace
from hyco_export.protocol.tree import EMPTY_TREE, ROOT, Source, Tree
from hyco_export.server.admission import Limits
from hyco_export.server.engine import Engine, LocalTransport
from tests.device.test_systems import FACTS, GREEDY, INFO, MODEL, PAPER, PROMPT, SETTINGS, run, toy_device
from tests.support.scripted import ScriptedSession

FLAT = ((1.0, 10.0), (65.0, 10.0))
MOE = ((1.0, 2.6), (5.0, 6.0), (9.0, 8.6), (17.0, 12.1), (33.0, 15.5), (65.0, 17.2))  # 8 of 128 experts, 2.9 TB/s
SERVER, WALL = Price(server_ms=1.0), Price(wall_ms=1.0)
PROMPTS = [PROMPT, PROMPT[:1], [2, 2, 8, 9, 10, 3, 4], [7, 7, 7], [11, 3, 5], [1, 2, 3, 4, 5, 6]]
CHAIN = Tree((1, 2, 3, 4), (ROOT, 0, 1, 2), tuple(d * math.log(0.5) for d in range(1, 5)), (Source.CHAIN,) * 4)


def wide(probabilities: Sequence[float]) -> Tree:
    """Children of the root with these scores."""
    count = len(probabilities)
    logs = tuple(math.log(value) for value in probabilities)
    return Tree(tuple(range(count)), (ROOT,) * count, logs, (Source.SLM,) * count)


# ------------------------------------------------------------------------------------------------------- expectations


def test_a_chain_is_expected_to_win_the_sum_of_its_paths() -> None:
    np.testing.assert_allclose(expected_accepted(CHAIN, np.exp(CHAIN.log_probs)), [0.5, 0.75, 0.875, 0.9375])


def test_siblings_win_one_token_together_and_the_best_count_first() -> None:
    tree = wide([0.3, 0.6, 0.4])
    np.testing.assert_allclose(expected_accepted(tree, np.exp(tree.log_probs)), [0.6, 1.0, 1.0])


def test_below_a_depth_no_more_is_won_than_in_it() -> None:
    tree = Tree((1, 2, 3), (ROOT, 0, 0), tuple(map(math.log, (0.2, 0.2, 0.1))), (Source.SLM,) * 3)
    np.testing.assert_allclose(expected_accepted(tree, np.exp(tree.log_probs)), [0.2, 0.4, 0.4])


def test_the_order_follows_what_was_accepted_and_keeps_ancestors() -> None:
    tree = Tree((1, 2, 3), (ROOT, 0, ROOT), tuple(map(math.log, (0.6, 0.4, 0.3))), (Source.CHAIN,) * 2 + (Source.SLM,))
    budget = PricedBudget(FLAT, SERVER)
    assert budget.rows(tree, 0.0).tolist() == [0, 1, 2]
    for _ in range(100):
        budget.observe(tree, [2], 0.0)  # never the chain
    assert budget.rows(tree, 0.0).tolist() == [2, 0, 1]
    for _ in range(1000):
        budget.observe(tree, [1], 0.0)  # a child more often than its parent, as no verdict has it
    assert budget.rows(tree, 0.0).tolist().index(0) < budget.rows(tree, 0.0).tolist().index(1)


def test_what_was_accepted_corrects_scores_by_source_and_depth() -> None:
    calibration = Calibration()
    np.testing.assert_allclose(calibration.probabilities(CHAIN), np.exp(CHAIN.log_probs))
    for _ in range(1000):
        calibration.observe(CHAIN, [0, 1])
    found = calibration.probabilities(CHAIN)
    assert found[:2] == pytest.approx([1.0, 1.0], abs=0.02)  # each round, where a half was expected twice
    source = (PRIOR + 2000) / (PRIOR + 1500)  # the third node was there and rejected, nothing is known of the fourth
    third = 0.5 * PRIOR * source / (PRIOR + 500)
    assert found[2:] == pytest.approx([found[1] * third, found[1] * third * 0.5 * source])
    other = wide([0.5])  # another source of the same depth
    assert calibration.probabilities(other) == pytest.approx([0.5])


# ------------------------------------------------------------------------------------------------------------- choices


def test_depths_that_were_never_sent_are_judged_by_their_source() -> None:
    short = Tree(CHAIN.tokens[:2], CHAIN.parents[:2], CHAIN.log_probs[:2], CHAIN.sources[:2])
    calibration = Calibration()
    for _ in range(1000):
        calibration.observe(short, [0, 1])
    assert calibration.probabilities(CHAIN) == pytest.approx([1.0] * 4, abs=0.02)


@pytest.mark.parametrize("tree", [CHAIN, wide([0.9, 0.05, 0.01])])
@pytest.mark.parametrize("price", [SERVER, WALL, Price(1.0, 0.5)])
def test_where_rows_cost_nothing_the_whole_tree_is_sent(tree: Tree, price: Price) -> None:
    assert len(PricedBudget(FLAT, price).rows(tree, draft_ms=3.0)) == len(tree)


def test_the_best_ratio_of_tokens_to_milliseconds_is_sent() -> None:
    budget = PricedBudget(((1.0, 10.0), (3.0, 12.0), (4.0, 20.0), (5.0, 28.0)), SERVER)
    tokens, costs = [1.5, 1.75, 1.875, 1.9375], [11.0, 12.0, 20.0, 28.0]
    best = 1 + int(np.argmax(np.array(tokens) / costs))
    assert (len(budget.rows(CHAIN, 0.0)), best) == (2, 2)


def test_a_smaller_pass_is_no_dearer_than_a_larger_one() -> None:
    noisy = PricedBudget(((1.0, 10.0), (3.0, 50.0), (5.0, 10.0)), SERVER)
    assert len(noisy.rows(CHAIN, 0.0)) == 4
    assert len(noisy.rows(wide([0.5, 0.4]), 0.0)) == 2


def test_one_node_is_sent_at_least_and_no_tree_is_none() -> None:
    dear = PricedBudget(((1.0, 1.0), (2.0, 100.0)), SERVER)
    assert len(dear.rows(CHAIN, 0.0)) == 1
    assert len(dear.rows(EMPTY_TREE, 0.0)) == 0


def test_a_round_that_takes_long_anyway_takes_more_nodes() -> None:
    steep = ((1.0, 1.0), (2.0, 2.0), (5.0, 20.0))
    by_server, by_wall = PricedBudget(steep, SERVER), PricedBudget(steep, WALL)
    assert len(by_server.rows(CHAIN, 500.0)) == len(by_wall.rows(CHAIN, 0.0)) == 1
    assert len(by_wall.rows(CHAIN, 500.0)) == 4  # of drafting
    near = PricedBudget(steep, WALL)
    near.observe(EMPTY_TREE, (), link_ms=0.0)
    far = PricedBudget(steep, WALL)
    far.observe(EMPTY_TREE, (), link_ms=500.0)
    assert (len(near.rows(CHAIN, 0.0)), len(far.rows(CHAIN, 0.0))) == (1, 4)
    for _ in range(50):
        far.observe(EMPTY_TREE, (), link_ms=0.0)  # the link has become quick
    assert len(far.rows(CHAIN, 0.0)) == 1
    mixed = PricedBudget(steep, Price(server_ms=1.0, wall_ms=1e-4))
    assert len(mixed.rows(CHAIN, 500.0)) == 1


# ------------------------------------------------------------------------------------------------------ whole systems


def traces(system: str, budget: int | str, rows_ms: Sequence[tuple[float, float]] = ()) -> list[GenerationTrace]:
    """Sampled answers of the scripted verifier, one drafter for all prompts."""
    drafting = msgspec.structs.replace(SETTINGS.drafting, budget=budget, candidates_per_row=32)
    settings = msgspec.structs.replace(SETTINGS, drafting=drafting, rows_ms=tuple(rows_ms))
    chosen = find_system(system)
    drafter = make_drafter(chosen, settings, toy_device())
    found = []
    for seed, prompt in enumerate(PROMPTS):
        transport = LocalTransport(Engine(lambda: ScriptedSession(MODEL), FACTS, Limits(prompt_limit=64)), INFO)
        request = make_request(chosen, settings, "p", PAPER, seed, 60)
        found.append(generate(prompt, request, drafter, transport))
    return found


def g_ms(generations: Sequence[GenerationTrace], rows_ms: Sequence[tuple[float, float]]) -> float:
    """Milliseconds of the server a token, were its passes to take what the curve says."""
    rounds = [record for one in generations for record in one.rounds]
    at, ms = zip(*rows_ms, strict=True)
    spent = sum(float(np.interp(1 + len(record.tree), at, ms)) for record in rounds)
    return spent / sum(len(record.tokens) for record in rounds)


def sizes(generations: Sequence[GenerationTrace]) -> list[int]:
    return [len(record.tree) for one in generations for record in one.rounds]


@pytest.mark.parametrize("system", ["hyco", "hyco-exact", "specedge", "specedge-pd"])
def test_on_a_mixture_of_experts_fewer_nodes_cost_less_than_any_fixed_number(system: str) -> None:
    auto = traces(system, "auto", MOE)
    assert np.mean(sizes(auto)) < 16
    fixed = [g_ms(traces(system, nodes), MOE) for nodes in (8, 32)]
    assert g_ms(auto, MOE) < 0.8 * fixed[1] and g_ms(auto, MOE) < 1.02 * min(fixed)


def test_on_a_flat_curve_the_trees_are_those_of_the_whole_budget() -> None:
    assert sizes(traces("hyco", "auto", FLAT)) == sizes(traces("hyco", 32))
    assert [one.tokens for one in traces("hyco", "auto", FLAT)] == [one.tokens for one in traces("hyco", 32)]


def test_a_cut_tree_changes_no_greedy_text() -> None:
    drafting = Drafting(budget="auto")
    settings = msgspec.structs.replace(SETTINGS, drafting=drafting, rows_ms=MOE)
    drafter = make_drafter(find_system("hyco-exact"), settings, toy_device())
    for prompt in PROMPTS:
        trace = run("hyco-exact", prompt, GREEDY, 1, 20, drafter=drafter)
        assert list(trace.tokens) == MODEL.answer(prompt, 20)
        assert max(len(record.tree) for record in trace.rounds) < 32


def test_a_number_is_not_priced() -> None:
    assert priced_budget(msgspec.structs.replace(SETTINGS, rows_ms=MOE)) is None


def test_without_a_curve_the_whole_budget_is_sent_and_it_is_said(caplog: pytest.LogCaptureFixture) -> None:
    assert sizes(traces("hyco", "auto")) == sizes(traces("hyco", 32))
    assert [record.getMessage() for record in caplog.records] == [
        "drafting.budget is auto, but the server does not say what rows cost: trees of 32 nodes"
    ]


@pytest.mark.parametrize(
    ("objective", "price"), [("server-time", SERVER), ("delivery", WALL), (Price(2.0, 0.5), Price(2.0, 0.5))]
)
def test_objectives_are_prices(objective: str | Price, price: Price) -> None:
    drafting = Drafting(budget="auto", objective=objective)  # type: ignore[arg-type]
    settings = msgspec.structs.replace(SETTINGS, drafting=drafting, rows_ms=MOE)
    found = priced_budget(settings)
    assert found is not None
    other = PricedBudget(MOE, price)
    for draft_ms in (0.0, 10.0, 1000.0):
        assert len(found.rows(CHAIN, draft_ms)) == len(other.rows(CHAIN, draft_ms))
