"""Training of the multi-token-prediction head on answers that the verifier sampled.

What the head does at inference (transformers' `SinglePositionMultiTokenCandidateGenerator`): with x[t+1] just sampled and
h[t] the verifier's last state after its final norm, step k = 0..K-1 reads concat(E(x[t+1+k]), s[k]) with s[0] = h[t] and
s[k] the head's own projected state, at the one position t+1, and attends to the verifier's keys and values of positions
<= t (sliding layers: the window's inclusive last 65). Training does the same for all t at once. Feeding the sampled
tokens instead of the head's own is exact: a chain matters only while it equals the verifier's draws.
Legend: B rows, T query positions, H channels, V vocabulary, K chain length.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
from transformers import Gemma4AssistantForCausalLM, Gemma4ForCausalLM
from transformers.modeling_outputs import BaseModelOutput

from hyco_export.nn.tiny.batches import Row, padded_ids, shuffled_batches
from hyco_export.nn.tiny.configs import CHAIN_LENGTH, SLIDING_WINDOW, head_config, head_generation_config
from hyco_export.nn.tiny.losses import capped, output_loss
from hyco_export.nn.tiny.optimise import Optimiser, run_steps, scale_fresh_query_norms
from hyco_export.nn.tiny.sampling import truncated_distribution
from hyco_export.nn.tiny.tokenizer import PAD_ID


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
    return head.to(torch.bfloat16).to(torch.float32), loss


def head_loss(
    head: Gemma4AssistantForCausalLM, verifier: Gemma4ForCausalLM, batch: Sequence[Row]
) -> torch.Tensor:
    """Mean cross-entropy over the K steps and all answer positions that they predict."""
    ids = padded_ids(batch)  # [B, T]
    with torch.no_grad():
        seen = verifier.model(input_ids=ids, use_cache=False, return_shared_kv_states=True)
        logits = capped(verifier.lm_head(seen.last_hidden_state), verifier.config.final_logit_softcapping)
    starts = torch.tensor([row.answer_start for row in batch])[:, None]
    losses = []
    for k, states in enumerate(taught_states(ChainContext(head, verifier, seen), ids)):
        # query t of step k predicts the token at t+2+k; the verifier's distribution for it stands at t+1+k
        predicted = ids[:, k + 2 :]
        roots = torch.arange(1, predicted.shape[1] + 1)[None]  # index of x[t+1], which the round has already committed
        wanted = (roots >= starts) & (predicted != PAD_ID)
        targets = truncated_distribution(logits[:, k + 1 : -1][wanted])
        losses.append(output_loss(states[:, : predicted.shape[1]][wanted], head.lm_head.weight, targets))
    return torch.stack(losses).mean()


class ChainContext:
    """What all K steps of a batch share: masks, positions and the verifier's keys and values. Never changes.

    Query t of T-1 stands for the round whose root is x[t+1]; `seen` is the verifier's output for `ids` [B, T].
    """

    def __init__(self, head: Gemma4AssistantForCausalLM, verifier: Gemma4ForCausalLM, seen: BaseModelOutput) -> None:
        hidden = seen.last_hidden_state
        self.queries = hidden.shape[1] - 1
        self.head = head
        self.embed = verifier.get_input_embeddings()
        self.first_states = hidden[:, : self.queries]
        self.masks = head_masks(self.queries)
        self.positions = torch.arange(1, self.queries + 1)[None]
        self.kv = {kind: (k[:, :, :-1], v[:, :, :-1]) for kind, (k, v) in seen.shared_kv_states.items()}

    def step(self, tokens: torch.Tensor, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """One step: tokens [B, T-1], states [B, T-1, H] -> (normed states for the output layer, projected states)."""
        pair = torch.cat([self.embed(tokens), states], dim=-1)  # [B, T-1, 2H]
        output = self.head.model(
            inputs_embeds=self.head.pre_projection(pair),
            attention_mask=self.masks,
            position_ids=self.positions,
            shared_kv_states=self.kv,
            use_cache=False,
            output_hidden_states=True,  # without it transformers slices per-layer inputs, which a head lacks
        )
        return output.last_hidden_state, self.head.post_projection(output.last_hidden_state)


def taught_states(context: ChainContext, ids: torch.Tensor) -> Iterator[torch.Tensor]:
    """The head's normed states [B, T-1, H] of steps 0..K-1, each step fed the token of `ids` [B, T].

    Rows whose token lies beyond the end read padding and are to be ignored.
    """
    padded = torch.nn.functional.pad(ids, (0, CHAIN_LENGTH), value=PAD_ID)
    states = context.first_states
    for k in range(CHAIN_LENGTH):
        normed, states = context.step(padded[:, 1 + k : 1 + k + context.queries], states)
        yield normed


def drafted_tokens(context: ChainContext, ids: torch.Tensor) -> torch.Tensor:
    """The chains [B, T-1, K] that the head drafts behind every root of `ids` [B, T], each step fed its own token."""
    tokens, states = ids[:, 1:], context.first_states
    chain = []
    for _ in range(CHAIN_LENGTH):
        normed, states = context.step(tokens, states)
        tokens = context.head.lm_head(normed).argmax(-1)
        chain.append(tokens)
    return torch.stack(chain, dim=-1)


def head_masks(queries: int) -> dict[str, torch.Tensor]:
    """Additive masks [1, 1, T, T]: query t sees keys j <= t, in sliding layers also t - j <= window (inclusive)."""
    distance = torch.arange(queries)[:, None] - torch.arange(queries)[None]
    visible = {
        "full_attention": distance >= 0,
        "sliding_attention": (distance >= 0) & (distance <= SLIDING_WINDOW),
    }
    return {kind: torch.where(seen, 0.0, float("-inf"))[None, None] for kind, seen in visible.items()}
