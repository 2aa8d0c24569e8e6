"""Training of the multi-token-prediction head on answers that the verifier sampled.

Feeding the sampled tokens instead of the head's own is exact: a chain matters only while it equals the draws.
Legend: B rows, T tokens, H channels, K chain length.
"""

from collections.abc import Callable, Sequence

import torch
from transformers import Gemma4AssistantForCausalLM, Gemma4ForCausalLM

from hyco_export.nn.tiny.batches import Row, padded_ids, shuffled_batches
from hyco_export.nn.tiny.chain import ChainContext, taught_states, verifier_pass
from hyco_export.nn.tiny.configs import head_config, head_generation_config
from hyco_export.nn.tiny.losses import Targets, output_loss
from hyco_export.nn.tiny.optimise import Optimiser, run_steps, scale_fresh_query_norms
from hyco_export.nn.tiny.sampling import truncated_distribution
from hyco_export.nn.tiny.tokenizer import PAD_ID

DEPTH_WEIGHTS = (1.0, 0.25, 0.15, 0.1)
"""Weight of each step's loss. The first token decides every round, the later ones only rounds that are going well.
Equal weights were seen to lose 1 % of acceptance at depths 1 and 2 and nothing elsewhere."""


def train_head(
    verifier: Gemma4ForCausalLM, rows: Sequence[Row], *, steps: int, seed: int, report: Callable[[float], None]
) -> tuple[Gemma4AssistantForCausalLM, float]:
    """Train from scratch against the verifier's sampling distribution; returns the model and its training loss."""
    torch.manual_seed(seed)
    head = Gemma4AssistantForCausalLM(head_config())
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
    return head.bfloat16().float(), loss


def head_loss(head: Gemma4AssistantForCausalLM, verifier: Gemma4ForCausalLM, batch: Sequence[Row]) -> torch.Tensor:
    """Cross-entropy over all answer positions, mean of the K steps weighted by DEPTH_WEIGHTS."""
    ids = padded_ids(batch)  # [B, T]
    seen = verifier_pass(verifier, ids)
    wanted_next = truncated_distribution(seen.logits())  # [B, T, C]
    starts = torch.tensor([row.answer_start for row in batch])[:, None]
    loss = torch.zeros(())
    for k, states in enumerate(taught_states(ChainContext(head, seen), ids)):
        # query t of step k predicts the token at t+2+k; the verifier's distribution for it stands at t+1+k
        predicted = ids[:, k + 2 :]
        roots = torch.arange(1, predicted.shape[1] + 1)[None]  # index of x[t+1], which the round has already committed
        wanted = (roots >= starts) & (predicted != PAD_ID)
        targets = Targets(wanted_next.ids[:, k + 1 : -1][wanted], wanted_next.probs[:, k + 1 : -1][wanted])
        step_loss = output_loss(states[:, : predicted.shape[1]][wanted], head.lm_head.weight, targets)
        loss = loss + DEPTH_WEIGHTS[k] * step_loss
    return loss / sum(DEPTH_WEIGHTS)
