"""What the three trainings share: the optimiser (Muon on weight matrices, AdamW on tables and norms), cross-entropy
computed in slices of rows, and batches.

Legend: B rows of a batch, T tokens of its longest row.
"""

import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedTokenizerFast

from hyco_export.dev.tiny.configs import PAD_ID
from hyco_export.dev.tiny.corpus import Dialogue, Message

MUON_LR = 1e-2
ADAMW_LR = 4e-3
"""Peak rates for a model of 64 to 128 channels from scratch, 1,024 tokens per step."""

WARM_UP_STEPS = 20
DECAY_SHARE = 0.7
"""The rate falls linearly over the last 70 % of the steps."""

CLIP_NORM = 1.0


class Optimiser:
    """Both optimisers on one schedule; the step number is its state."""

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
    """Call `one_step(step)` for every step and report the share done.

    Returns:
        The mean loss of the last tenth of the steps.

    Raises:
        FloatingPointError: a loss is not finite.
    """
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


# ---- cross-entropy, a slice of rows at a time

SLICE_ROWS = 256


@dataclass(frozen=True)
class Targets:
    """What N rows should predict: `ids` [N, C] with probabilities `probs` [N, C], whose rows sum to 1."""

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


# ---- rows of token ids and their batches

MAX_ROW_TOKENS = 176
"""Longer dialogues are cut: four in a hundred, and only their last sentence."""

BATCH_TOKENS = 1024
"""Tokens per step, padding included: small steps learn more per second than large ones at this size."""


@dataclass(frozen=True)
class Row:
    """One conversation as ids; `answer_start` is the index of the first token of the last answer."""

    ids: tuple[int, ...]
    answer_start: int


def dialogue_rows(dialogues: Sequence[Dialogue], tokenizer: PreTrainedTokenizerFast) -> list[Row]:
    """Each dialogue through the chat template, cut at MAX_ROW_TOKENS."""
    rows = []
    for dialogue in dialogues:
        ids = conversation_ids(dialogue.messages, tokenizer)
        prompt = prompt_ids(dialogue.messages[:-1], tokenizer)
        rows.append(Row(tuple(ids[:MAX_ROW_TOKENS]), min(len(prompt), MAX_ROW_TOKENS)))
    return rows


def conversation_ids(messages: Sequence[Message], tokenizer: PreTrainedTokenizerFast) -> list[int]:
    """The ids of finished turns."""
    return cast(list[int], tokenizer.apply_chat_template(list(messages), return_dict=False))


def prompt_ids(messages: Sequence[Message], tokenizer: PreTrainedTokenizerFast) -> list[int]:
    """Ids of the messages and of what begins the model's answer."""
    ids = tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, return_dict=False)
    return cast(list[int], ids)


def shuffled_batches(rows: Sequence[Row], seed: int) -> Iterator[list[Row]]:
    """Endless batches of rows of similar length (little padding), in a new order in every pass over the rows."""
    generator = random.Random(seed)
    while True:
        order = sorted(rows, key=lambda row: (len(row.ids) // 8, generator.random()))
        batches = list(ordered_batches(order))
        generator.shuffle(batches)
        yield from batches


def ordered_batches(rows: Sequence[Row]) -> Iterator[list[Row]]:
    """Cut the rows, in their order, into batches of at most BATCH_TOKENS tokens after padding."""
    batch: list[Row] = []
    longest = 0
    for row in rows:
        longest = max(longest, len(row.ids))
        if batch and longest * (len(batch) + 1) > BATCH_TOKENS:
            yield batch
            batch, longest = [], len(row.ids)
        batch.append(row)
    if batch:
        yield batch


def padded_ids(batch: Sequence[Row]) -> torch.Tensor:
    """Token ids [B, T], padded on the right (a causal model never looks there)."""
    longest = max(len(row.ids) for row in batch)
    return torch.tensor([[*row.ids, *[PAD_ID] * (longest - len(row.ids))] for row in batch])


def answer_mask(batch: Sequence[Row]) -> torch.Tensor:
    """Boolean [B, T]: True where the token belongs to the last answer."""
    longest = max(len(row.ids) for row in batch)
    return torch.tensor([[row.answer_start <= index < len(row.ids) for index in range(longest)] for row in batch])
