"""Losses of the trainings against transformers' own, and a few steps of each training."""

import pytest
import torch
import torch.nn.functional as F

from hyco_export.dev.tiny import trainings
from hyco_export.dev.tiny.chain import truncated_distribution
from hyco_export.dev.tiny.packing import fake_quant_of, quantised_modules
from hyco_export.dev.tiny.training import Row, answer_mask, padded_ids
from hyco_export.dev.tiny.trainings import head_loss, mean_loss, next_token_loss, slm_loss, train_head, train_slm

ROWS = [Row((2, 300, 301, *range(900, 912), 6), 3), Row((2, *range(40, 52), 6), 2), Row((2, 500, 77, 1200, 31, 6), 2)]


def nothing(_share: float) -> None:
    pass


@torch.no_grad()
def test_the_verifiers_loss_is_transformers_own(family) -> None:
    ids = padded_ids(ROWS)
    labels = torch.where(ids == 0, -100, ids)
    torch.testing.assert_close(next_token_loss(family[0], ROWS), family[0](input_ids=ids, labels=labels).loss)
    assert next_token_loss(family[0], ROWS, z_weight=0.1) > next_token_loss(family[0], ROWS)
    assert mean_loss(family[0], ROWS) == pytest.approx(float(next_token_loss(family[0], ROWS)))


@torch.no_grad()
def test_a_drafters_loss_is_the_cross_entropy_to_the_sampled_distribution(family) -> None:
    verifier = family[0]  # in the place of the SLM, too: its logits are known
    ids, wanted = padded_ids(ROWS), answer_mask(ROWS)[:, 1:]
    logits = verifier(input_ids=ids).logits[:, :-1][wanted]
    targets = truncated_distribution(logits)
    dense = torch.zeros_like(logits).scatter_(1, targets.ids, targets.probs)
    torch.testing.assert_close(slm_loss(verifier, verifier, ROWS), F.cross_entropy(logits, dense))


@torch.no_grad()
def test_the_heads_loss_counts_the_first_token_most(family, monkeypatch) -> None:
    verifier, head, _ = family
    losses = []
    for depth in range(4):
        monkeypatch.setattr(trainings, "DEPTH_WEIGHTS", tuple(float(each == depth) for each in range(4)))
        losses.append(float(head_loss(head, verifier, ROWS)))
    monkeypatch.undo()
    weighted = sum(weight * loss for weight, loss in zip(trainings.DEPTH_WEIGHTS, losses, strict=True))
    assert float(head_loss(head, verifier, ROWS)) == pytest.approx(weighted / sum(trainings.DEPTH_WEIGHTS), rel=1e-5)
    assert trainings.DEPTH_WEIGHTS[0] > sum(trainings.DEPTH_WEIGHTS[1:])


def test_a_trained_head_holds_values_of_bfloat16_and_depends_on_the_seed_alone(family) -> None:
    first, loss = train_head(family[0], ROWS, steps=2, seed=3, report=nothing)
    again, same_loss = train_head(family[0], ROWS, steps=2, seed=3, report=nothing)
    assert loss == same_loss
    for (name, weight), other in zip(first.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(weight, other) and torch.equal(weight, weight.bfloat16().float()), name
        assert not weight.requires_grad


def test_a_trained_slm_computes_with_weights_on_their_grids(family) -> None:
    shares: list[float] = []
    slm, _ = train_slm(family[0], ROWS, steps=4, seed=3, report=shares.append)
    assert shares == [0.25, 0.5, 0.75, 1.0]
    modules = quantised_modules(slm)
    assert len(modules) > 30
    for name, module in modules.items():
        quantiser, _ = fake_quant_of(module)
        steps = module.weight / quantiser.scale
        torch.testing.assert_close(steps, steps.round(), atol=1e-4, rtol=0, msg=name)
