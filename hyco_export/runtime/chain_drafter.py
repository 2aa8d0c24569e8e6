"""The verifier's own head on the server: a chain of top-1 tokens, over everything or an artifact's share.

Step by step what transformers' SinglePositionMultiTokenCandidateGenerator computes for K/V of exactly the committed
positions (transformers itself leaves rows of rejected drafts in what the head reads). All steps use the root's
position; a step's input is [embedding, state], first [e(root), h], then the head's own token and projected state. Since
a single row sees all it is given, the masks are the slices and nothing is built per step.

Legend: L committed positions before the root, N K/V heads, d head dimension, H the verifier's hidden size.
"""

from collections.abc import Callable, Mapping

import torch
from transformers import Gemma4AssistantForCausalLM

INCLUSIVE_END = 1  # the assistant's sliding mask shows window + 1 keys, the verifier's window - 1 past ones
SEES_ALL = {"full_attention": None, "sliding_attention": None}


class ChainDrafter:
    """Drafts with one head, in the verifier's precision.

    Args:
        head: the verifier's assistant.
        kept_ids: [C] the only ids that it may draft; None for the whole vocabulary.
        window: newest committed positions that it may see; None for all that its layers see.
    """

    def __init__(
        self, head: Gemma4AssistantForCausalLM, kept_ids: torch.Tensor | None = None, window: int | None = None
    ) -> None:
        self._head = head
        self._kept_ids = kept_ids
        sliding = head.config.get_text_config().sliding_window + INCLUSIVE_END
        self._spans = {"full": window, "sliding": sliding if window is None else min(sliding, window)}

    def span(self, layer_type: str) -> int | None:
        """Newest committed positions that the head sees in layers of this type; None = all."""
        return self._spans[layer_type]

    def chain(
        self,
        embed: Callable[[torch.Tensor], torch.Tensor],
        root: int,
        state: torch.Tensor,
        keys_values: Mapping[str, tuple[torch.Tensor, torch.Tensor]],
        position: int,
        steps: int,
    ) -> tuple[int, ...]:
        """`steps` tokens after `root`, which stands at `position` = L.

        embed: ids [1, 1] -> [1, 1, H] with the embedding's factor; state [H]: h of position L - 1, after the final
        norm; keys_values: (K, V) [1, N, n, d] of the newest positions within `span`, by transformers' layer type.
        """
        device = state.device
        token = torch.tensor([[root]], device=device)
        positions = torch.tensor([[position]], device=device)
        hidden = state[None, None]  # [1, 1, H]
        drafted = []
        for _ in range(steps):
            token, hidden = self._step(torch.cat([embed(token), hidden], dim=-1), positions, keys_values)
            drafted.append(token)
        return tuple(torch.cat(drafted).flatten().tolist())  # one transfer for all steps

    def _step(
        self,
        inputs: torch.Tensor,
        positions: torch.Tensor,
        keys_values: Mapping[str, tuple[torch.Tensor, torch.Tensor]],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """inputs [1, 1, 2H] -> the top-1 token [1, 1] and the next state [1, 1, H]."""
        head = self._head
        last = head.model(
            inputs_embeds=head.pre_projection(inputs),
            attention_mask=SEES_ALL,
            position_ids=positions,
            shared_kv_states=dict(keys_values),
            use_cache=False,
        ).last_hidden_state
        if head.masked_embedding is None:
            logits = head.lm_head(last)
        else:
            logits = head.masked_embedding(last, head.lm_head.weight)
        return self._best(logits), head.post_projection(last)

    def _best(self, logits: torch.Tensor) -> torch.Tensor:
        """The likeliest allowed token of logits [1, 1, V]: [1, 1]."""
        if self._kept_ids is None:
            return logits.argmax(dim=-1)
        return self._kept_ids[logits[..., self._kept_ids].argmax(dim=-1)]
