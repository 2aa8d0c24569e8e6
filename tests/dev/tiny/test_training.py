"""The sliced loss against torch, values and gradients; the truncated distribution against transformers."""

import pytest
import torch
import torch.nn.functional as F
from transformers import TopKLogitsWarper, TopPLogitsWarper

from hyco_export.dev.tiny.chain import TOP_K, TOP_P, truncated_distribution
from hyco_export.dev.tiny.training import SLICE_ROWS, Targets, capped, output_loss


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


def test_truncated_distribution_equals_the_warpers():
    logits = 4 * torch.randn(50, 300, generator=torch.Generator().manual_seed(1))
    warped = TopPLogitsWarper(TOP_P)(None, TopKLogitsWarper(TOP_K)(None, logits))
    targets = truncated_distribution(logits)
    dense = torch.zeros_like(logits).scatter_(1, targets.ids, targets.probs)
    torch.testing.assert_close(dense, warped.softmax(-1))
