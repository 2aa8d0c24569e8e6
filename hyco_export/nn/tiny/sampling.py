"""Answers that the verifier writes itself, and its distribution over them.

Head and SLM learn from these, not from the corpus: they draft what the verifier says.
Legend: B rows, T tokens, N answer positions, C = 64 kept entries (top-k).
"""

from collections.abc import Callable, Sequence

import torch
from transformers import Gemma4ForCausalLM

from hyco_export.nn.tiny.batches import Row
from hyco_export.nn.tiny.configs import SAMPLING
from hyco_export.nn.tiny.losses import Targets
from hyco_export.nn.tiny.tokenizer import PAD_ID, STOP_IDS

GENERATION_BATCH = 96
MAX_ANSWER_TOKENS = 128

TOP_K: int = SAMPLING["top_k"]
TOP_P: float = SAMPLING["top_p"]


@torch.no_grad()
def sampled_rows(
    verifier: Gemma4ForCausalLM, prompts: Sequence[Sequence[int]], *, seed: int, report: Callable[[float], None]
) -> list[Row]:
    """One sampled answer per prompt, at the paper's sampling; in the order of the prompts."""
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


def _generate(verifier: Gemma4ForCausalLM, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    """The answers' ids, with the stop id."""
    longest = max(len(prompt) for prompt in prompts)
    ids = torch.tensor([[PAD_ID] * (longest - len(prompt)) + list(prompt) for prompt in prompts])
    output = verifier.generate(
        input_ids=ids, attention_mask=(ids != PAD_ID).long(), max_new_tokens=MAX_ANSWER_TOKENS, **SAMPLING
    )
    return [_until_stop(answer) for answer in output[:, longest:].tolist()]


def _until_stop(ids: list[int]) -> list[int]:
    for index, token in enumerate(ids):
        if token in STOP_IDS:
            return ids[: index + 1]
    return ids


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
