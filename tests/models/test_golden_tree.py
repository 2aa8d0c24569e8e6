"""Golden draws: the numbers of PROTOCOL.md's example, and the tokens that a plain reading of a distribution gives;
distances from the cuts."""

import numpy as np
import pytest
import torch

from hyco_export.models.golden_tree import CumulativeDistribution, _warped, cut_distances, draw_number, golden_draws
from hyco_export.protocol.wire import Sampling

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


def test_tokens_about_as_likely_as_the_last_one_kept_are_close_to_the_cut() -> None:
    """Rounding changes their ranks, and with them the mass behind each: the mass alone would call them far from it."""
    log_probs = torch.log(torch.tensor([[0.1, *[0.09] * 2, *[0.08, 0.0799, 0.0798] * 3]], dtype=torch.float64))
    kind = Sampling(1.0, 0, 0.9)
    found, inside = cut_distances(log_probs, kind)[0], _warped(log_probs, kind)[0].isfinite()
    assert inside.sum() == 11
    assert torch.equal((found > 0)[found != 0], inside[found != 0])
    assert found[3:].abs().max() <= np.log(0.08 / 0.0798) + 1e-9
    assert found[:3].min() > 0.1  # by their own log p


@pytest.mark.parametrize("kind", [Sampling(1.0, 64, 0.95), Sampling(0.7, 0, 0.5), Sampling(1.0, 5, 1.0)])
def test_the_sign_of_a_distance_says_what_the_cuts_say(kind: Sampling) -> None:
    logits = torch.randn(20, 300, generator=torch.Generator().manual_seed(1)) * 2
    log_probs = (logits.double() / kind.temperature).log_softmax(dim=-1)
    assert torch.equal(cut_distances(log_probs, kind) > 0, _warped(logits, kind).isfinite())
