"""The head's drafts behind every position of a text, all positions at once.

At inference (transformers' `SinglePositionMultiTokenCandidateGenerator`): with x[t+1] just sampled and
h[t] the verifier's last state after its final norm, step k = 0..K-1 reads concat(E(x[t+1+k]), s[k]), with s[0] = h[t]
and s[k] the head's own projected state, at the one position t+1, and attends to the verifier's keys and values of
positions <= t (sliding layers: the last 65, the window's edge included).

Legend: B rows, T tokens, T-1 queries, H channels, K chain length.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from hyco_export.dev.tiny.configs import CHAIN_LENGTH, PAD_ID, SAMPLING, SLIDING_WINDOW, STOP_IDS
from hyco_export.dev.tiny.training import Row, Targets, capped
from hyco_export.models.capture import until_stop
from hyco_export.models.families.gemma4 import LanguageModel
from hyco_export.models.families.gemma4_assistant import HeadModel


@dataclass(frozen=True)
class VerifierPass:
    """One pass over ids [B, T]: final states [B, T, H], shared keys and values [B, heads, T, D] by layer type."""

    verifier: LanguageModel
    states: torch.Tensor
    kv: dict[str, tuple[torch.Tensor, torch.Tensor]]

    def logits(self) -> torch.Tensor:
        """Capped logits [B, T, V]."""
        return capped(self.verifier.lm_head(self.states), self.verifier.config.final_logit_softcapping)


@torch.no_grad()
def verifier_pass(verifier: LanguageModel, ids: torch.Tensor) -> VerifierPass:
    """Run the verifier over ids [B, T] and keep what a head reads."""
    output = verifier.model(input_ids=ids, use_cache=False, return_shared_kv_states=True)
    return VerifierPass(verifier, output.last_hidden_state, dict(output.shared_kv_states))


class ChainContext:
    """What all K steps of a batch share: masks, positions and the verifier's keys and values.

    Query t of T-1 is the round whose root is x[t+1].
    """

    def __init__(self, head: HeadModel, seen: VerifierPass) -> None:
        self.queries = seen.states.shape[1] - 1
        self.head = head
        self.embed = seen.verifier.get_input_embeddings()
        self.first_states = seen.states[:, : self.queries]
        self.masks = head_masks(self.queries)
        self.positions = torch.arange(1, self.queries + 1)[None]
        self.kv = {kind: (k[:, :, :-1], v[:, :, :-1]) for kind, (k, v) in seen.kv.items()}

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


def teacher_forced_states(context: ChainContext, ids: torch.Tensor) -> Iterator[torch.Tensor]:
    """The head's normed states [B, T-1, H] of steps 0..K-1; every step reads the tokens of `ids` [B, T].

    Rows whose token would lie beyond the end read padding: the caller ignores them.
    """
    padded = F.pad(ids, (0, CHAIN_LENGTH), value=PAD_ID)
    states = context.first_states
    for k in range(CHAIN_LENGTH):
        normed, states = context.step(padded[:, 1 + k : 1 + k + context.queries], states)
        yield normed


def drafted_tokens(context: ChainContext, ids: torch.Tensor) -> torch.Tensor:
    """Chains [B, T-1, K] that the head drafts behind every root of `ids` [B, T], each step on its own last token."""
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


# ---- answers that the verifier writes

GENERATION_BATCH = 96
MAX_ANSWER_TOKENS = 128

TOP_K: int = SAMPLING["top_k"]
TOP_P: float = SAMPLING["top_p"]


@torch.no_grad()
def sampled_rows(
    verifier: LanguageModel, prompts: Sequence[Sequence[int]], *, seed: int, report: Callable[[float], None]
) -> list[Row]:
    """Each prompt with an answer drawn by the paper's sampling, in the order of the prompts."""
    torch.manual_seed(seed)
    order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
    rows: dict[int, Row] = {}
    for start in range(0, len(order), GENERATION_BATCH):
        chosen = order[start : start + GENERATION_BATCH]
        answers = _generate(verifier, [prompts[index] for index in chosen])
        for index, answer in zip(chosen, answers, strict=True):
            rows[index] = Row((*prompts[index], *answer), len(prompts[index]))
        report(len(rows) / len(order))
    return [rows[index] for index in range(len(prompts))]


def _generate(verifier: LanguageModel, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    """Ids of the answers, their stop ids included."""
    longest = max(len(prompt) for prompt in prompts)
    ids = torch.tensor([[PAD_ID] * (longest - len(prompt)) + list(prompt) for prompt in prompts])
    output = verifier.generate(
        input_ids=ids, attention_mask=(ids != PAD_ID).long(), max_new_tokens=MAX_ANSWER_TOKENS, **SAMPLING
    )
    return [until_stop(answer, STOP_IDS) for answer in output[:, longest:].tolist()]


def truncated_distribution(logits: torch.Tensor) -> Targets:
    """The paper's sampling distribution at each row: top-k, then the smallest set that reaches top-p.

    logits [..., V] -> Targets [..., C] with C = top-k entries, the removed ones with probability 0.
    """
    values, ids = logits.topk(TOP_K, dim=-1)  # [..., C], descending
    probs = values.softmax(-1)
    # an entry stays while the mass before it is below top-p
    kept = probs.cumsum(-1) - probs < TOP_P
    probs = probs * kept
    return Targets(ids, probs / probs.sum(-1, keepdim=True))
