"""The verifier's own head on the server: a chain of top-1 tokens over the full vocabulary and the whole prefix.

Step by step what transformers' SinglePositionMultiTokenCandidateGenerator computes for K/V of exactly the committed
positions (transformers itself leaves rows of rejected drafts in what the head reads). All steps use the root's
position; a step's input is [embedding, state], first [e(root), h], then the head's own token and projected state. A
row sees all the keys of its session that it is given, so the masks are the slices and nothing is built per step; the
rows of several sessions go through a step together and part in the attention.

Legend: S sessions, L committed positions before a root, N K/V heads, d head dimension, H the verifier's hidden size.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from transformers import Gemma4AssistantForCausalLM

from hyco_export.runtime import slot_attention
from hyco_export.runtime.slot_attention import Seen

INCLUSIVE_END = 1  # the assistant's sliding mask shows window + 1 keys, the verifier's window - 1 past ones


class Root(NamedTuple):
    """Where a session's chain starts: `token` stands at `position` = L.

    state [H]: h of position L - 1, after the final norm; keys_values: (K, V) [N, n, d] of the newest positions within
    the drafter's `span`, by transformers' layer type.
    """

    token: int
    position: int
    state: torch.Tensor
    keys_values: Mapping[str, tuple[torch.Tensor, torch.Tensor]]


class ChainDrafter:
    """Drafts with one head, in the verifier's precision; the head's attention becomes `slot_attention`."""

    def __init__(self, head: Gemma4AssistantForCausalLM) -> None:
        head.model.set_attn_implementation(slot_attention.NAME)
        self._head = head
        self._spans = {"full": None, "sliding": head.config.get_text_config().sliding_window + INCLUSIVE_END}
        # see Verifier: the head's layers all reuse K/V
        self._all_rows = torch.tensor(0)

    def span(self, layer_type: str) -> int | None:
        """Newest committed positions that the head sees in layers of this type; None = all."""
        return self._spans[layer_type]

    def chains(
        self, embed: Callable[[torch.Tensor], torch.Tensor], roots: Sequence[Root], steps: int
    ) -> list[tuple[int, ...]]:
        """`steps` tokens after each of the S roots.

        embed: ids [1, S] -> [1, S, H] with the embedding's factor.
        """
        device = roots[0].state.device
        token = torch.tensor([[root.token for root in roots]], device=device)
        positions = torch.tensor([[root.position for root in roots]], device=device)
        keys_values = {
            name: tuple([root.keys_values[name][which] for root in roots] for which in (0, 1))
            for name in roots[0].keys_values
        }
        seen = dict.fromkeys(keys_values, [Seen(1, None)] * len(roots))
        hidden = torch.stack([root.state for root in roots])[None]  # [1, S, H]
        drafted = []
        for _ in range(steps):
            inputs = torch.cat([embed(token), hidden], dim=-1)
            token, hidden = self._step(inputs, positions, keys_values, seen)
            drafted.append(token)
        return list(zip(*torch.cat(drafted).tolist(), strict=True))  # one transfer for all steps

    def _step(
        self,
        inputs: torch.Tensor,
        positions: torch.Tensor,
        keys_values: Mapping[str, tuple[list[torch.Tensor], ...]],
        seen: Mapping[str, list[Seen]],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """inputs [1, S, 2H] -> the top-1 tokens [1, S] and the next states [1, S, H]."""
        head = self._head
        last = head.model(
            inputs_embeds=head.pre_projection(inputs),
            attention_mask=dict(seen),
            position_ids=positions,
            shared_kv_states=dict(keys_values),
            use_cache=False,
            logits_to_keep=self._all_rows,
        ).last_hidden_state
        if head.masked_embedding is None:
            logits = head.lm_head(last)
        else:
            logits = head.masked_embedding(last, head.lm_head.weight)
        return logits.argmax(dim=-1), head.post_projection(last)
