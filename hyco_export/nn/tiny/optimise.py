"""The optimiser that all three trainings share: Muon on weight matrices, AdamW on tables and norms."""

import math
from collections.abc import Callable, Iterable

import torch
from torch import nn

MUON_LR = 1e-2
ADAMW_LR = 4e-3
"""Peak rates for a model of 64 to 128 channels from scratch, 1,024 tokens per step."""

WARM_UP_STEPS = 20
DECAY_SHARE = 0.7
"""The rate falls linearly over the last 70 % of the steps."""

CLIP_NORM = 1.0


class Optimiser:
    """Steps both optimisers along one schedule; state: the step number."""

    def __init__(self, model: nn.Module, steps: int, *, rate_scale: float = 1.0) -> None:
        parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        matrices = [p for name, p in parameters.items() if _is_weight_matrix(name, p)]
        others = [p for name, p in parameters.items() if not _is_weight_matrix(name, p)]
        self.parameters = list(parameters.values())
        self.steps = steps
        self.step_number = 0
        self.peaks = (rate_scale * MUON_LR, rate_scale * ADAMW_LR)
        self.parts = (
            torch.optim.Muon(matrices, momentum=0.95, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(others, betas=(0.9, 0.95), weight_decay=0.0),
        )

    def step(self, loss: torch.Tensor) -> None:
        """One update from the gradients of `loss`."""
        loss.backward()
        nn.utils.clip_grad_norm_(self.parameters, CLIP_NORM)
        factor = rate_factor(self.step_number, self.steps)
        for part, peak in zip(self.parts, self.peaks, strict=True):
            part.param_groups[0]["lr"] = peak * factor
            part.step()
            part.zero_grad()
        self.step_number += 1


def rate_factor(step: int, steps: int) -> float:
    """Share of the peak rate at `step`: linear warm-up, plateau, linear decay to (almost) zero."""
    warm_up = min(1.0, (step + 1) / WARM_UP_STEPS)
    decay = min(1.0, (steps - step) / (DECAY_SHARE * steps))
    return min(warm_up, decay)


def run_steps(steps: int, one_step: Callable[[int], float], report: Callable[[float], None]) -> float:
    """Call `one_step(step)` for every step, report the share done; returns the mean loss of the last tenth."""
    losses = []
    for step in range(steps):
        losses.append(one_step(step))
        if not math.isfinite(losses[-1]):
            raise FloatingPointError(f"the loss became {losses[-1]} at step {step}")
        report((step + 1) / steps)
    last = losses[-max(1, steps // 10) :]
    return sum(last) / len(last)


def scale_fresh_query_norms(model: nn.Module) -> None:
    """Multiply every fresh `q_norm.weight` by head_dim^-0.5.

    Gemma 4 scales attention by 1.0, not by head_dim^-0.5: from scratch its logits would start far too sharp.
    """
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("q_norm.weight"):
                parameter.mul_(parameter.numel() ** -0.5)


def _is_weight_matrix(name: str, parameter: nn.Parameter) -> bool:
    return parameter.ndim == 2 and not any(table in name for table in ("embed_tokens", "lm_head", "scale"))


def mean_of(values: Iterable[float]) -> float:
    """Arithmetic mean; 0 for no values."""
    numbers = list(values)
    return sum(numbers) / len(numbers) if numbers else 0.0
