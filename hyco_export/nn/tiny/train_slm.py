"""Training of the small language model on answers that the verifier sampled, first in float, then on the stored grids.

Legend: B rows, T tokens, H channels.
"""

from collections.abc import Callable, Sequence

import torch
from transformers import Gemma4ForCausalLM

from hyco_export.nn.tiny.batches import Row, padded_ids, shuffled_batches
from hyco_export.nn.tiny.chain import verifier_pass
from hyco_export.nn.tiny.configs import sampling_generation_config, slm_config
from hyco_export.nn.tiny.fake_quant import attach_fake_quant
from hyco_export.nn.tiny.losses import output_loss
from hyco_export.nn.tiny.optimise import Optimiser, run_steps, scale_fresh_query_norms
from hyco_export.nn.tiny.sampling import truncated_distribution
from hyco_export.nn.tiny.tokenizer import PAD_ID

QUANTISED_SHARE = 0.5
"""Share of the steps with fake quantisation: the last ones."""

QUANTISED_RATE_SCALE = 0.4
"""The second part refines: its peak rates are lower."""


def train_slm(
    verifier: Gemma4ForCausalLM, rows: Sequence[Row], *, steps: int, seed: int, report: Callable[[float], None]
) -> tuple[Gemma4ForCausalLM, float]:
    """Train from scratch; returns the model with fake quantisers attached and its last training loss."""
    torch.manual_seed(seed)
    slm = Gemma4ForCausalLM(slm_config())
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
    slm: Gemma4ForCausalLM,
    verifier: Gemma4ForCausalLM,
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


def slm_loss(slm: Gemma4ForCausalLM, verifier: Gemma4ForCausalLM, batch: Sequence[Row]) -> torch.Tensor:
    """Mean cross-entropy against the verifier's sampling distribution over the answers' tokens."""
    ids = padded_ids(batch)  # [B, T]
    following = ids[:, 1:]
    starts = torch.tensor([row.answer_start for row in batch])[:, None]
    wanted = (torch.arange(1, ids.shape[1])[None] >= starts) & (following != PAD_ID)
    targets = truncated_distribution(verifier_pass(verifier, ids[:, :-1]).logits()[wanted])
    states = slm.model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state[wanted]
    return output_loss(states, slm.lm_head.weight, targets, soft_cap=slm.config.final_logit_softcapping)
