"""Golden draws: the numbers of PROTOCOL.md's example, and the tokens that a plain reading of a distribution gives."""

import numpy as np
import pytest

from hyco_export.models.golden_tree import CumulativeDistribution, draw_number, golden_draws

SEED = 20261011
FAR = np.full(10, 99.0)


def distribution(
    probs: dict[int, float], cut: dict[int, float] | None = None, edges: np.ndarray = FAR
) -> CumulativeDistribution:
    """Of ten tokens; those of `cut` lie outside the cuts."""
    values = np.zeros(10)
    for token, prob in {**probs, **(cut or {})}.items():
        values[token] = prob
    with np.errstate(divide="ignore"):
        return CumulativeDistribution(np.log(values), np.isin(np.arange(10), list(probs)), edges)


def test_numbers_are_those_of_the_protocols_example() -> None:
    assert draw_number(SEED, 4, 0) == 0.855885774425914
    assert draw_number(SEED, 5, 1) == 0.5250685604580982
    assert draw_number(SEED, 5, 2) == 0.4255838375490806


def test_draws_are_those_of_the_protocols_example() -> None:
    here = distribution({3: 0.5, 5: 0.25, 9: 0.25})
    drawn = [here.draw(draw_number(SEED, *place)) for place in ((4, 0), (5, 1), (5, 2))]
    assert [token for token, _ in drawn] == [9, 5, 3]
    assert [margin for _, margin in drawn] == pytest.approx([0.105886, 0.025069, 0.074416], abs=1e-6)


def test_a_token_close_to_the_cut_takes_the_certainty_of_draws_that_it_would_change() -> None:
    near = FAR.copy()
    near[2] = -0.1
    kept, cut = {3: 0.5, 5: 0.5}, {2: 0.5}
    assert distribution(kept, cut).draw(0.2) == (3, 0.3)
    assert distribution(kept, cut, near).draw(0.2) == (3, 0.0)  # one token wider: 2, 3 and 5 have a third each


def test_every_stored_seed_draws_the_root() -> None:
    before, row = distribution({3: 0.25, 5: 0.75}), distribution({1: 1.0})
    draws = golden_draws(3, 8, [0], [before, row])
    assert len(draws) == 24 and all(draw_number(draw.seed, 7, 0) < 0.25 for draw in draws)
    assert {draw.tokens for draw in draws} == {(1,)} and {draw.margins for draw in draws} == {(1.0,)}
    assert golden_draws(4, 8, [0], [before, row]) == ()
