"""The laws of every acceptance rule, and what the table refuses; brute force over all paths is the oracle."""

import math
from collections.abc import Callable

import msgspec
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from hyco_export.errors import ProtocolError
from hyco_export.protocol import wire
from hyco_export.protocol.acceptance import PROBS, RAW, RULES, Judged, Query, Verdict, check_acceptance, decide, look
from hyco_export.protocol.sampling import raw_distribution
from hyco_export.protocol.tree import ROOT, path_to
from tests.protocol.test_acceptance import VOCAB, rounds

STOP = 2
STOPS = frozenset({STOP})
EPSILONS = st.sampled_from([0.06, 0.15, 0.3, 0.6])
Acceptable = Callable[[Judged, int], bool]


@st.composite
def judged(draw: st.DrawFn, greedy: bool = False) -> Judged:
    """A random round whose logits are those of p~ before a random cut, so that `typical` has its own view."""
    tokens, parents, draws, rows, probs = draw(rounds(greedy=greedy))
    generator = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    whole = rows if greedy else 0.8 * rows + 0.2 * generator.dirichlet(np.ones(VOCAB), len(rows))
    whole = whole / whole.sum(axis=1, keepdims=True)
    raw = np.array([whole[parent + 1, token] for token, parent in zip(tokens, parents, strict=True)])
    entropies = -np.where(whole > 0, whole * np.log(np.where(whole > 0, whole, 1.0)), 0.0).sum(axis=1)
    return Judged(tuple(tokens), tuple(parents), tuple(draws), probs, raw.astype(np.float64), entropies)


def matches(case: Judged, row: int) -> bool:
    return case.tokens[row] == case.draws[case.parents[row] + 1]


def brute_force(case: Judged, acceptable: Acceptable) -> tuple[int, ...]:
    """The best of all nodes, each judged edge by edge from the root."""
    candidates = []
    for row in [ROOT, *range(len(case.tokens))]:
        path = path_to(case.parents, row)
        if all(acceptable(case, node) for node in path):
            log_prob = sum(math.log(case.probs[node]) if case.probs[node] > 0 else -math.inf for node in path)
            candidates.append(((len(path), sum(matches(case, n) for n in path), round(log_prob, 9), -row), path))
    return max(candidates)[1]


def require(case: Judged, verdict: Verdict, acceptable: Acceptable) -> None:
    best = brute_force(case, acceptable)
    end = best[-1] if best else ROOT
    assert verdict == Verdict(best, tuple(matches(case, row) for row in best), case.draws[end + 1])


def by_epsilon(eps: float) -> Acceptable:
    return lambda case, row: bool(matches(case, row) or case.probs[row] >= np.float32(eps))


def at_rejections(eps: float) -> Acceptable:
    def acceptable(case: Judged, row: int) -> bool:
        siblings = [node for node in range(len(case.tokens)) if case.parents[node] == case.parents[row]]
        if any(matches(case, node) for node in siblings):
            return matches(case, row)
        return bool(case.probs[row] >= np.float32(eps))

    return acceptable


def by_entropy(cap: float, alpha: float) -> Acceptable:
    def acceptable(case: Judged, row: int) -> bool:
        limit = min(cap, alpha * math.exp(-float(case.entropies[case.parents[row] + 1])))
        return matches(case, row) or float(case.raw_probs[row]) > limit

    return acceptable


def draws_alone_for_stops(rule: Acceptable) -> Acceptable:
    return lambda case, row: rule(case, row) and (matches(case, row) or case.tokens[row] not in STOPS)


@settings(max_examples=300, deadline=None)
@given(judged(), EPSILONS, st.booleans())
def test_epsilon_takes_the_best_of_all_paths(case: Judged, eps: float, stop_needs_draw: bool) -> None:
    rule = draws_alone_for_stops(by_epsilon(eps)) if stop_needs_draw else by_epsilon(eps)
    require(case, decide(case, wire.Acceptance("epsilon", eps, stop_needs_draw), STOPS), rule)


@settings(max_examples=300, deadline=None)
@given(judged(), EPSILONS, st.booleans())
def test_at_rejections_takes_the_best_of_all_paths(case: Judged, eps: float, stop_needs_draw: bool) -> None:
    rule = draws_alone_for_stops(at_rejections(eps)) if stop_needs_draw else at_rejections(eps)
    require(case, decide(case, wire.Acceptance("epsilon-at-rejections", eps, stop_needs_draw), STOPS), rule)


@settings(max_examples=300, deadline=None)
@given(judged(), st.sampled_from([0.02, 0.09, 0.4]), st.sampled_from([0.1, 0.3, 1.0]), st.booleans())
def test_typical_takes_the_best_of_all_paths(case: Judged, cap: float, alpha: float, stop_needs_draw: bool) -> None:
    rule = by_entropy(cap, alpha)
    options = wire.Acceptance("typical", 1.0, stop_needs_draw, cap, alpha)
    require(case, decide(case, options, STOPS), draws_alone_for_stops(rule) if stop_needs_draw else rule)


@settings(max_examples=300, deadline=None)
@given(judged(), EPSILONS)
def test_rejections_alone_never_take_more_than_every_node(case: Judged, eps: float) -> None:
    everywhere = decide(case, wire.Acceptance("epsilon", eps), STOPS)
    rejections = decide(case, wire.Acceptance("epsilon-at-rejections", eps), STOPS)
    exact = decide(case, wire.EXACT, STOPS)
    assert len(exact.accepted) <= len(rejections.accepted) <= len(everywhere.accepted)
    assert all(by_epsilon(eps)(case, row) for row in rejections.accepted)
    assert rejections.accepted[: len(exact.accepted)] == exact.accepted  # it starts with every draw that was drafted


@settings(max_examples=200, deadline=None)
@given(judged(), st.sampled_from(["epsilon", "epsilon-at-rejections"]))
def test_an_epsilon_of_one_is_exact(case: Judged, rule: str) -> None:
    assume(len(case.probs) == 0 or case.probs.max() < 1.0)
    assert decide(case, wire.Acceptance(rule, 1.0), STOPS) == decide(case, wire.EXACT, STOPS)


@settings(max_examples=200, deadline=None)
@given(judged(greedy=True), st.sampled_from(sorted(RULES)))
def test_no_rule_adds_anything_to_greedy(case: Judged, rule: str) -> None:
    options = wire.Acceptance(rule, 0.005 if "epsilon" in RULES[rule].options else 1.0)
    assert decide(case, options, STOPS) == decide(case, wire.EXACT, STOPS)


@settings(max_examples=300, deadline=None)
@given(judged(), st.sampled_from(sorted(set(RULES) - {"exact"})))
def test_a_stop_that_needs_a_draw_is_never_taken_by_a_threshold(case: Judged, rule: str) -> None:
    options = wire.Acceptance(rule, 0.06 if "epsilon" in RULES[rule].options else 1.0, stop_needs_draw=True)
    verdict = decide(case, options, STOPS)
    for row, drawn in zip(verdict.accepted, verdict.drawn, strict=True):
        assert drawn or case.tokens[row] != STOP


def test_without_the_option_a_stop_can_be_taken_by_every_relaxed_rule() -> None:
    case = Judged((STOP,), (ROOT,), (0, 1), np.array([0.4], np.float32), np.array([0.4]), np.array([1.0, 1.0]))
    for rule in set(RULES) - {"exact"}:
        options = wire.Acceptance(rule, 0.1 if "epsilon" in RULES[rule].options else 1.0)
        assert decide(case, options, STOPS) == Verdict((0,), (False,), 1)


def test_a_token_that_the_cuts_removed_is_the_last_choice_of_typical() -> None:
    # both children are typical; p~ has cut the first
    probs, raw = np.array([0.0, 0.2], np.float32), np.array([0.5, 0.3])
    case = Judged((4, 5), (ROOT, ROOT), (0, 1, 1), probs, raw, np.ones(3))
    assert decide(case, wire.Acceptance("typical", 1.0), STOPS).accepted == (1,)


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from([0.3, 1.0, 1.7]))
def test_typical_reads_the_softmax_at_the_temperature_before_any_cut(seed: int, temperature: float) -> None:
    generator = np.random.default_rng(seed)
    logits = generator.normal(0, 3, (3, 11)).astype(np.float32)
    tokens, parents = [4, 7], [ROOT, 0]
    sampling = wire.Sampling(temperature, 2, 0.5)
    seen = look(Query(logits, tokens, parents, 9, sampling, 1, frozenset({PROBS, RAW})))
    wide = logits.astype(np.float64) / temperature
    p = np.exp(wide) / np.exp(wide).sum(axis=1, keepdims=True)
    np.testing.assert_allclose(seen.raw_probs, [p[0, 4], p[1, 7]], rtol=1e-9)
    np.testing.assert_allclose(seen.entropies, -(p * np.log(p)).sum(axis=1), rtol=1e-9, atol=1e-12)
    direct = [row for row, token in enumerate(tokens) if token == seen.draws[parents[row] + 1] or
              seen.raw_probs[row] > min(0.09, 0.3 * math.exp(-seen.entropies[parents[row] + 1]))]  # fmt: skip
    accepted = decide(seen, wire.Acceptance("typical", 1.0), STOPS).accepted
    assert accepted == ((0, 1) if direct == [0, 1] else (0,) if 0 in direct else ())


def test_raw_values_stay_finite_where_logits_are_far_apart() -> None:
    logits = np.array([[0.0, -3e4, -np.inf], [5.0, 5.0, 5.0]], np.float32)
    probs, entropies = raw_distribution(logits, 0.01, [0], [ROOT])
    assert probs.tolist() == [1.0]
    np.testing.assert_allclose(entropies, [0.0, math.log(3)], atol=1e-12)


def test_greedy_is_one_hot_for_typical() -> None:
    logits = np.array([[0.0, 2.0], [3.0, 1.0], [0.0, 0.0]], np.float32)
    probs, entropies = raw_distribution(logits, 0.0, [1, 0], [ROOT, ROOT])
    assert probs.tolist() == [1.0, 0.0] and entropies.tolist() == [0.0] * 3


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (wire.Acceptance("judge", 1.0), "unsupported", "acceptance.rule is 'judge'"),
        (wire.Acceptance("x" * 999, 1.0), "unsupported", f"acceptance.rule is '{'x' * 40}'"),
        (wire.Acceptance("epsilon", 0.0), "value_range", "acceptance.epsilon is 0.0"),
        (wire.Acceptance("epsilon", math.nan), "value_range", "acceptance.epsilon is nan"),
        (wire.Acceptance("epsilon-at-rejections", 1.5), "value_range", "acceptance.epsilon is 1.5"),
        (wire.Acceptance("typical", 1.0, False, 0.0), "value_range", "acceptance.posterior_threshold is 0.0"),
        (wire.Acceptance("typical", 1.0, False, 0.1, math.inf), "value_range", "acceptance.posterior_alpha is inf"),
        (wire.Acceptance("typical", 1.0, False, 0.1, -1.0), "value_range", "acceptance.posterior_alpha is -1.0"),
        (wire.Acceptance("exact", 0.5), "unsupported", "acceptance.epsilon is 0.5, but the rule exact does not read"),
        (wire.Acceptance("exact", -1.0), "unsupported", "acceptance.epsilon is -1.0, but the rule exact does not read"),
        (wire.Acceptance("exact", math.nan), "unsupported", "acceptance.epsilon is nan, but the rule exact does not"),
        (wire.Acceptance("typical", 0.0), "unsupported", "acceptance.epsilon is 0.0, but the rule typical does not"),
        (wire.Acceptance("epsilon", 0.5, False, math.nan), "unsupported", "acceptance.posterior_threshold is nan"),
        (wire.Acceptance("exact", 1.0, False, 0.09, -1.0), "unsupported", "acceptance.posterior_alpha is -1.0"),
        (wire.Acceptance("exact", 1.0, True), "unsupported", "acceptance.stop_needs_draw is True"),
        (wire.Acceptance("typical", 0.5), "unsupported", "acceptance.epsilon is 0.5"),
        (wire.Acceptance("epsilon", 0.5, False, 0.2), "unsupported", "acceptance.posterior_threshold is 0.2"),
    ],
)
def test_unknown_rules_and_options_that_would_be_ignored_are_refused(
    options: wire.Acceptance, code: str, message: str
) -> None:
    with pytest.raises(ProtocolError) as caught:
        check_acceptance(options)
    assert caught.value.code == code and message in caught.value.message


def test_every_rule_is_taken_with_its_defaults_and_its_own_options() -> None:
    values = {"epsilon": 0.5, "stop_needs_draw": True, "posterior_threshold": 0.2, "posterior_alpha": 0.5}
    assert len(RULES) == 4
    for name, rule in RULES.items():
        check_acceptance(wire.Acceptance(name, 1.0))
        check_acceptance(msgspec.structs.replace(wire.EXACT, rule=name, **{key: values[key] for key in rule.options}))
