"""The sliced loss against torch, the schedule, and batches."""

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F

from hyco_export.dev.tiny.training import (
    BATCH_TOKENS,
    SLICE_ROWS,
    WARM_UP_STEPS,
    Row,
    Targets,
    answer_mask,
    capped,
    ordered_batches,
    output_loss,
    padded_ids,
    rate_factor,
    run_steps,
    shuffled_batches,
)


@pytest.mark.parametrize(("soft_cap", "z_weight"), [(None, 0.0), (3.0, 0.0), (3.0, 0.1)])
def test_sliced_loss_equals_torch(soft_cap, z_weight):
    generator = torch.Generator().manual_seed(0)
    rows = SLICE_ROWS + 3
    states = torch.randn(rows, 8, generator=generator, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(32, 8, generator=generator, dtype=torch.float64, requires_grad=True)
    probs = torch.rand(rows, 32, generator=generator, dtype=torch.float64).softmax(-1)
    targets = Targets(torch.arange(32).expand(rows, 32), probs)

    logits = capped(states @ weight.T, soft_cap)
    wanted = F.cross_entropy(logits, probs) + z_weight * logits.logsumexp(-1).pow(2).mean()
    wanted_gradients = torch.autograd.grad(wanted, (states, weight))
    given = output_loss(states, weight, targets, soft_cap=soft_cap, z_weight=z_weight)
    gradients = torch.autograd.grad(given, (states, weight))

    torch.testing.assert_close(given, wanted)
    torch.testing.assert_close(gradients, wanted_gradients)


def test_the_rate_warms_up_stays_and_falls_to_almost_zero() -> None:
    rates = [rate_factor(step, 200) for step in range(200)]
    assert rates[0] == 1 / WARM_UP_STEPS
    assert rates[WARM_UP_STEPS - 1 : 61] == [1.0] * (62 - WARM_UP_STEPS)
    assert all(before > after > 0 for before, after in pairwise(rates[60:]))
    assert rates[-1] < 0.01


def test_steps_give_the_mean_of_the_last_tenth_and_stop_at_a_loss_that_is_not_finite() -> None:
    shares: list[float] = []
    assert run_steps(20, float, shares.append) == 18.5
    assert shares[0] == 0.05 and shares[-1] == 1.0
    with pytest.raises(FloatingPointError, match="the loss became nan at step 2"):
        run_steps(5, lambda step: float("nan") if step == 2 else 1.0, shares.append)


def test_batches_hold_every_row_once_within_the_limit() -> None:
    rows = [Row(tuple(range(7, 7 + length)), 3) for length in (90, 5, 170, 60, 33, 120, 8, 151) * 3]
    batches = list(ordered_batches(rows))
    assert [row for batch in batches for row in batch] == rows
    assert all(padded_ids(batch).numel() <= BATCH_TOKENS for batch in batches) and len(batches) > 1
    endless = shuffled_batches(rows, seed=1)
    one_pass: list[Row] = []
    while len(one_pass) < len(rows):
        one_pass += next(endless)
    assert sorted(len(row.ids) for row in one_pass) == sorted(len(row.ids) for row in rows)
    first, again = shuffled_batches(rows, seed=2), shuffled_batches(rows, seed=2)
    assert [next(first) for _ in range(3)] == [next(again) for _ in range(3)]


def test_only_the_last_answer_is_marked() -> None:
    batch = [Row((7, 8, 9, 10), 2), Row((7, 8), 1)]
    assert padded_ids(batch).tolist() == [[7, 8, 9, 10], [7, 8, 0, 0]]
    assert answer_mask(batch).tolist() == [[False, False, True, True], [False, True, False, False]]
