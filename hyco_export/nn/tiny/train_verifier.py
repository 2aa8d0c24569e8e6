"""Training of the verifier on the corpus, and its sharpening.

Legend: B rows, T tokens, H channels.
"""

from collections.abc import Callable, Sequence

import torch
from transformers import Gemma4ForCausalLM

from hyco_export.nn.tiny.batches import Row, ordered_batches, padded_ids, shuffled_batches
from hyco_export.nn.tiny.configs import sampling_generation_config, verifier_config
from hyco_export.nn.tiny.losses import Targets, output_loss
from hyco_export.nn.tiny.optimise import Optimiser, mean_of, run_steps, scale_fresh_query_norms
from hyco_export.nn.tiny.tokenizer import PAD_ID

Z_WEIGHT = 1e-2
"""Weight of the z-loss. With logits near log-probabilities (at most 0) sharpening raises them to a power; around +10 it
would push the best ones into the soft cap together and flatten them."""

SHARPENING = 2.25
"""Factor on the final norm after training, like a temperature of 1 / 2.25.

So small a model is much less certain than a real verifier, and at temperature 1 nothing could draft for it. The head is
trained afterwards, on the sharpened state.
"""


def train_verifier(
    rows: Sequence[Row], *, steps: int, seed: int, report: Callable[[float], None]
) -> tuple[Gemma4ForCausalLM, float]:
    """Train from scratch on all tokens of the rows; returns the sharpened model and the unsharpened training loss."""
    torch.manual_seed(seed)
    model = Gemma4ForCausalLM(verifier_config())
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


def next_token_loss(model: Gemma4ForCausalLM, batch: Sequence[Row], z_weight: float = 0.0) -> torch.Tensor:
    """Mean cross-entropy of every next token in the batch, plus the z-loss."""
    ids = padded_ids(batch)  # [B, T]
    states = model.model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state  # [B, T-1, H]
    following = ids[:, 1:]
    predicted = following != PAD_ID
    targets = Targets.from_ids(following[predicted])
    soft_cap = model.config.final_logit_softcapping
    return output_loss(states[predicted], model.lm_head.weight, targets, soft_cap=soft_cap, z_weight=z_weight)


@torch.no_grad()
def mean_loss(model: Gemma4ForCausalLM, rows: Sequence[Row]) -> float:
    """Next-token loss over all rows, batch by batch."""
    return mean_of(next_token_loss(model, batch).item() for batch in ordered_batches(rows))


def as_stored(model: Gemma4ForCausalLM) -> Gemma4ForCausalLM:
    """The values that a bfloat16 file keeps, back in float32: what is trained next must see those."""
    return model.bfloat16().float()
