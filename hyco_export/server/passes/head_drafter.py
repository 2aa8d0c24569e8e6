"""The verifier's own head on the server: a chain of top-1 tokens, over the whole vocabulary and prefix or over a head
artifact's keep set and window.

Step by step what transformers' SinglePositionMultiTokenCandidateGenerator computes for K/V of exactly the committed
positions (transformers itself leaves rows of rejected drafts in what the head reads). All steps use the root's
position; a step's input is [embedding, state], first [e(root), h], then the head's own token and projected state. A row
sees all keys of its session that it is given, so no masks are needed: the slices do their work. The rows of several
sessions go through a step together, except in the attention.

Legend: S sessions, L committed positions before a root, N K/V heads, d head dimension, H the verifier's hidden size.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch.nn import functional

from hyco_export.models.families.gemma4_assistant import HeadModel
from hyco_export.models.fused_layers import FusedStack, fits
from hyco_export.server.passes import attention as slot_attention
from hyco_export.server.passes.attention import KeysValues, PackedAttention, Seen

Layers = Callable[[torch.Tensor], torch.Tensor]  # [S, width] -> [S, width] after the head's norm
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
    """Drafts with one head, in the verifier's precision; the head's attention becomes `slot_attention`.

    Args:
        head: the verifier's assistant.
        kept_ids: [C] the only ids that it may draft; None for the whole vocabulary.
        window: newest committed positions that it may see; None for all that its layers see.
        suppressed: ids that the verifier never generates.
        fused: compute the layers with `models.fused_layers` where the head fits.
        compiled: let torch's compiler make the fused layers.
    """

    def __init__(
        self,
        head: HeadModel,
        kept_ids: torch.Tensor | None = None,
        window: int | None = None,
        fused: bool = True,
        compiled: bool = False,
        suppressed: Sequence[int] = (),
    ) -> None:
        head.model.set_attn_implementation(slot_attention.NAME)
        self._head = head
        self._in, self._out = head.pre_projection.weight, head.post_projection.weight
        self._kept_ids = kept_ids
        self._suppressed = list(suppressed)
        self._stack = FusedStack(head.model, compiled) if fused and fits(head.model) else None
        sliding: int = head.config.get_text_config().sliding_window + INCLUSIVE_END
        self._spans = {"full": window, "sliding": sliding if window is None else min(sliding, window)}
        self._all_rows = torch.tensor(0)  # as in Verifier: the head's layers all reuse K/V

    def span(self, layer_type: str) -> int | None:
        """Newest committed positions that the head sees in layers of this type; None = all."""
        return self._spans[layer_type]

    def chains(
        self, embed: Callable[[torch.Tensor], torch.Tensor], roots: Sequence[Root], steps: int
    ) -> list[tuple[int, ...]]:
        """`steps` tokens after each of the S roots.

        embed: ids [S] -> [S, H] with the embedding's factor.
        """
        device = roots[0].state.device
        token = torch.tensor([root.token for root in roots], device=device)
        positions = torch.tensor([root.position for root in roots], device=device)
        keys_values: dict[str, KeysValues] = {
            name: ([root.keys_values[name][0] for root in roots], [root.keys_values[name][1] for root in roots])
            for name in roots[0].keys_values
        }
        seen = dict.fromkeys(keys_values, [Seen(1, None)] * len(roots))
        layers = (self._fused if self._stack else self._plain)(positions, keys_values, seen)
        hidden = torch.stack([root.state for root in roots])  # [S, H]
        drafted: list[torch.Tensor] = []
        for step in range(steps):
            last = layers(functional.linear(torch.cat([embed(token), hidden], dim=-1), self._in))
            token = self._best(last)
            drafted.append(token)
            if step + 1 < steps:
                hidden = functional.linear(last, self._out)
        return list(zip(*torch.stack(drafted).tolist(), strict=True))  # one transfer for all steps

    def _fused(
        self, positions: torch.Tensor, keys_values: Mapping[str, KeysValues], seen: Mapping[str, Sequence[Seen]]
    ) -> Layers:
        """The fused layers."""
        stack = self._stack
        assert stack is not None
        rotations, attention = stack.rotations(positions), PackedAttention(seen, given=keys_values)
        return lambda hidden: stack.run(hidden, rotations, attention)[0]

    def _plain(
        self, positions: torch.Tensor, keys_values: Mapping[str, KeysValues], seen: Mapping[str, Sequence[Seen]]
    ) -> Layers:
        """transformers' own forward, for heads that cannot be fused."""

        def layers(hidden: torch.Tensor) -> torch.Tensor:
            last: torch.Tensor = self._head.model(
                inputs_embeds=hidden[None],
                attention_mask=dict(seen),
                position_ids=positions[None],
                shared_kv_states=dict(keys_values),
                use_cache=False,
                logits_to_keep=self._all_rows,
            ).last_hidden_state[0]
            return last

        return layers

    def _best(self, last: torch.Tensor) -> torch.Tensor:
        """The likeliest allowed tokens [S] of states [S, width]."""
        head = self._head
        if head.masked_embedding is None:
            logits = functional.linear(last, head.lm_head.weight)
        else:
            logits = head.masked_embedding(last[None], head.lm_head.weight)[0]
        logits[:, self._suppressed] = -torch.inf
        if self._kept_ids is None:
            return logits.argmax(dim=-1)
        return self._kept_ids[logits[:, self._kept_ids].argmax(dim=-1)]
