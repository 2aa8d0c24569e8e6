"""Cross-entropy at the output layer, computed in slices.

A whole batch of logits (1,000 rows x 2,048 entries) falls out of the processor's cache several times per step; slices
of SLICE_ROWS do not, and their gradients are formed on the spot.
Legend: N rows, H channels, V vocabulary, C entries of a sparse target distribution.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

SLICE_ROWS = 256


@dataclass(frozen=True)
class Targets:
    """What N rows should predict: `ids` [N, C] with probabilities `probs` [N, C] that sum to 1 per row."""

    ids: torch.Tensor
    probs: torch.Tensor

    @classmethod
    def from_ids(cls, ids: torch.Tensor) -> "Targets":
        """One certain token per row, `ids` [N]."""
        return cls(ids[:, None], torch.ones(len(ids), 1))

    def __getitem__(self, rows: slice | torch.Tensor) -> "Targets":
        return Targets(self.ids[rows], self.probs[rows])


def output_loss(
    states: torch.Tensor,
    weight: torch.Tensor,
    targets: Targets,
    *,
    soft_cap: float | None = None,
    z_weight: float = 0.0,
) -> torch.Tensor:
    """Mean cross-entropy of softmax(cap(states @ weight.T)) against the targets: states [N, H], weight [V, H].

    Plus `z_weight` times the mean square of the logits' log-sum-exp (PaLM's z-loss), which keeps logits near
    log-probabilities.
    """
    return _SlicedCrossEntropy.apply(states, weight, targets, soft_cap, z_weight)


def capped(logits: torch.Tensor, soft_cap: float | None) -> torch.Tensor:
    """Gemma's soft cap: cap * tanh(logits / cap)."""
    return logits if soft_cap is None else soft_cap * torch.tanh(logits / soft_cap)


class _SlicedCrossEntropy(torch.autograd.Function):
    """Forward computes the loss and both gradients; backward only scales them."""

    @staticmethod
    def forward(ctx, states, weight, targets, soft_cap, z_weight):
        total = states.new_zeros(())
        grad_states, grad_weight = torch.empty_like(states), torch.zeros_like(weight)
        for start in range(0, len(states), SLICE_ROWS):
            rows = slice(start, start + SLICE_ROWS)
            target = targets[rows]
            logits = capped(F.linear(states[rows], weight), soft_cap)
            log_z = logits.logsumexp(-1, keepdim=True)
            total += ((log_z - logits.gather(1, target.ids)) * target.probs).sum() + z_weight * (log_z**2).sum()
            # d loss / d logits = softmax * (1 + 2 z_weight log_z) - target; d cap(x) / dx = 1 - (cap(x) / cap)^2
            grad = (logits - log_z).exp_().mul_(1 + 2 * z_weight * log_z).scatter_add_(1, target.ids, -target.probs)
            if soft_cap is not None:
                grad *= 1 - (logits / soft_cap) ** 2
            grad_states[rows] = grad @ weight
            grad_weight.addmm_(grad.T, states[rows])
        ctx.save_for_backward(grad_states, grad_weight)
        ctx.rows = len(states)
        return total / len(states)

    @staticmethod
    def backward(ctx, grad_output):
        grad_states, grad_weight = ctx.saved_tensors
        factor = grad_output / ctx.rows
        return grad_states * factor, grad_weight * factor, None, None, None
