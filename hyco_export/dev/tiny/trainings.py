"""The trainings: the verifier on the corpus, then sharpened; the head and the SLM on answers that the verifier sampled,
the SLM first in float, then on its stored integers.

Legend: B rows, T tokens, H channels.
"""

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from hyco_export.dev.tiny.chain import ChainContext, teacher_forced_states, truncated_distribution, verifier_pass
from hyco_export.dev.tiny.configs import (
    PAD_ID,
    head_config,
    head_generation_config,
    sampling_generation_config,
    slm_config,
    verifier_config,
)
from hyco_export.dev.tiny.packing import attach_fake_quant
from hyco_export.dev.tiny.training import (
    Optimiser,
    Row,
    Targets,
    mean_of,
    ordered_batches,
    output_loss,
    padded_ids,
    run_steps,
    scale_fresh_query_norms,
    shuffled_batches,
)
from hyco_export.models.families.gemma4 import LanguageModel
from hyco_export.models.families.gemma4_assistant import HeadModel

Trained = TypeVar("Trained", LanguageModel, HeadModel)

Z_WEIGHT = 1e-2
"""Weight of the z-loss, which keeps logits near log-probabilities (at most 0). Sharpened, logits around +10 would reach
the soft cap, which makes the largest ones equal."""

SHARPENING = 2.25
"""Factor on the final norm after training, like a temperature of 1 / 2.25.

So small a model is much less certain than a real verifier, and at temperature 1 nothing could draft for it. The head is
trained afterwards, on the sharpened state.
"""


def train_verifier(
    rows: Sequence[Row], *, steps: int, seed: int, report: Callable[[float], None]
) -> tuple[LanguageModel, float]:
    """Train from scratch on all tokens of the rows; returns the sharpened model and the unsharpened training loss."""
    torch.manual_seed(seed)
    model = LanguageModel(verifier_config())
    model.generation_config = sampling_generation_config()
    scale_fresh_query_norms(model)
    optimiser = Optimiser(model, steps)
    batches = shuffled_batches(rows, seed)

    def one_step(_step: int) -> float:
        loss = next_token_loss(model, next(batches), Z_WEIGHT)
        optimiser.step(loss)
        return loss.item()

    loss = run_steps(steps, one_step, report)
    model.eval().requires_grad_(False)
    model.model.norm.weight.mul_(SHARPENING)
    return as_stored(model), loss


def next_token_loss(model: LanguageModel, batch: Sequence[Row], z_weight: float = 0.0) -> torch.Tensor:
    """Mean cross-entropy of every next token in the batch, plus the z-loss."""
    ids = padded_ids(batch)  # [B, T]
    states = model.model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state  # [B, T-1, H]
    following = ids[:, 1:]
    predicted = following != PAD_ID
    targets = Targets.from_ids(following[predicted])
    soft_cap = model.config.final_logit_softcapping
    return output_loss(states[predicted], model.lm_head.weight, targets, soft_cap=soft_cap, z_weight=z_weight)


@torch.no_grad()
def mean_loss(model: LanguageModel, rows: Sequence[Row]) -> float:
    """Next-token loss over all rows, batch by batch."""
    return mean_of(next_token_loss(model, batch).item() for batch in ordered_batches(rows))


def as_stored(model: Trained) -> Trained:
    """The model in float32 with the values that a bfloat16 file keeps: the next training must read those."""
    return model.bfloat16().float()


# ---- the head

DEPTH_WEIGHTS = (1.0, 0.25, 0.15, 0.1)
"""Weight of each step's loss: the first token counts in every round, a later one only where those before are accepted.
Equal weights lost 1 % of acceptance at depths 1 and 2 and changed nothing elsewhere."""


def train_head(
    verifier: LanguageModel, rows: Sequence[Row], *, steps: int, seed: int, report: Callable[[float], None]
) -> tuple[HeadModel, float]:
    """Train from scratch against the verifier's sampling distribution; returns the model and its training loss."""
    torch.manual_seed(seed)
    head = HeadModel(head_config())
    head.generation_config = head_generation_config()
    scale_fresh_query_norms(head)
    with torch.no_grad():
        head.lm_head.weight.copy_(verifier.lm_head.weight)
    optimiser = Optimiser(head, steps)
    batches = shuffled_batches(rows, seed)

    def one_step(_step: int) -> float:
        loss = head_loss(head, verifier, next(batches))
        optimiser.step(loss)
        return loss.item()

    loss = run_steps(steps, one_step, report)
    head.eval().requires_grad_(False)
    return as_stored(head), loss


def head_loss(head: HeadModel, verifier: LanguageModel, batch: Sequence[Row]) -> torch.Tensor:
    """Cross-entropy over all answer positions, mean of the K steps weighted by DEPTH_WEIGHTS."""
    ids = padded_ids(batch)  # [B, T]
    seen = verifier_pass(verifier, ids)
    wanted_next = truncated_distribution(seen.logits())  # [B, T, C]
    starts = torch.tensor([row.answer_start for row in batch])[:, None]
    loss = torch.zeros(())
    for k, states in enumerate(teacher_forced_states(ChainContext(head, seen), ids)):
        # query t of step k predicts the token at t+2+k; the verifier's distribution for it stands at t+1+k
        predicted = ids[:, k + 2 :]
        roots = torch.arange(1, predicted.shape[1] + 1)[None]  # index of x[t+1], which the round has already committed
        wanted = (roots >= starts) & (predicted != PAD_ID)
        targets = Targets(wanted_next.ids[:, k + 1 : -1][wanted], wanted_next.probs[:, k + 1 : -1][wanted])
        step_loss = output_loss(states[:, : predicted.shape[1]][wanted], head.lm_head.weight, targets)
        loss = loss + DEPTH_WEIGHTS[k] * step_loss
    return loss / sum(DEPTH_WEIGHTS)


# ---- the SLM, first in float, then on its stored integers

QUANTISED_SHARE = 0.5
"""Share of the steps with fake quantisation: the last ones."""

QUANTISED_RATE_SCALE = 0.4
"""The second part refines: its peak rates are lower."""


def train_slm(
    verifier: LanguageModel, rows: Sequence[Row], *, steps: int, seed: int, report: Callable[[float], None]
) -> tuple[LanguageModel, float]:
    """Train from scratch; returns the model with fake quantisers attached and its last training loss."""
    torch.manual_seed(seed)
    slm = LanguageModel(slm_config())
    slm.generation_config = sampling_generation_config()
    scale_fresh_query_norms(slm)
    quantised_steps = int(steps * QUANTISED_SHARE)
    float_steps = steps - quantised_steps

    _distil(slm, verifier, rows, Optimiser(slm, float_steps), seed, lambda share: report(share * float_steps / steps))
    attach_fake_quant(slm)
    optimiser = Optimiser(slm, quantised_steps, rate_scale=QUANTISED_RATE_SCALE)
    loss = _distil(
        slm, verifier, rows, optimiser, seed + 1, lambda share: report((float_steps + share * quantised_steps) / steps)
    )
    return slm.eval().requires_grad_(False), loss


def _distil(
    slm: LanguageModel,
    verifier: LanguageModel,
    rows: Sequence[Row],
    optimiser: Optimiser,
    seed: int,
    report: Callable[[float], None],
) -> float:
    batches = shuffled_batches(rows, seed)

    def one_step(_step: int) -> float:
        loss = slm_loss(slm, verifier, next(batches))
        optimiser.step(loss)
        return loss.item()

    return run_steps(optimiser.steps, one_step, report)


def slm_loss(slm: LanguageModel, verifier: LanguageModel, batch: Sequence[Row]) -> torch.Tensor:
    """Mean cross-entropy against the verifier's sampling distribution over the answers' tokens."""
    ids = padded_ids(batch)  # [B, T]
    following = ids[:, 1:]
    starts = torch.tensor([row.answer_start for row in batch])[:, None]
    wanted = (torch.arange(1, ids.shape[1])[None] >= starts) & (following != PAD_ID)
    targets = truncated_distribution(verifier_pass(verifier, ids[:, :-1]).logits()[wanted])
    states = slm.model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state[wanted]
    return output_loss(states, slm.lm_head.weight, targets, soft_cap=slm.config.final_logit_softcapping)
