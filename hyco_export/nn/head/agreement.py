"""How alike two heads draft: top-1 agreement and KL divergence per depth on response tokens.

Both heads read the same tokens, those of the sequence (teacher-forced), and each its own projected state, as `unroll`
says. Depth 1 is the paper's measure (§3.2: the quantised against the BF16 head).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import Gemma4AssistantForCausalLM

from hyco_export.nn.head.qat import divergences
from hyco_export.nn.head.unroll import RootRows, unroll


@dataclass(frozen=True)
class DepthAgreement:
    """One depth. `kl` is KL(reference || candidate) in nats per token; `positions` were compared."""

    top1: float
    kl: float
    positions: int


@torch.no_grad()
def compare_heads(
    reference: Gemma4AssistantForCausalLM,
    candidate: Gemma4AssistantForCausalLM,
    sequences: Sequence[RootRows],
    steps: int,
) -> list[DepthAgreement]:
    """Depths 1 .. steps of the candidate against the reference."""
    same, nats, counts = [0] * steps, [0.0] * steps, [0] * steps
    for rows in sequences:
        pairs = zip(unroll(reference, rows, steps), unroll(candidate, rows, steps), strict=True)
        for depth, (wanted, given) in enumerate(pairs):
            same[depth] += int((wanted.argmax(dim=-1) == given.argmax(dim=-1)).sum())
            nats[depth] += float(divergences(wanted, given).sum())
            counts[depth] += len(wanted)
    return [DepthAgreement(s / n, d / n, n) for s, d, n in zip(same, nats, counts, strict=True) if n]


@torch.no_grad()
def match_verifier(head: Gemma4AssistantForCausalLM, sequences: Sequence[RootRows], steps: int) -> list[float]:
    """Share of response tokens that the head's top-1 predicts, per depth: low where it reads the wrong inputs."""
    hits, counts = [0] * steps, [0] * steps
    for rows in sequences:
        for depth, logits in enumerate(unroll(head, rows, steps)):
            hits[depth] += int((logits.argmax(dim=-1) == rows.answers[depth:].to(logits.device)).sum())
            counts[depth] += len(logits)
    return [hit / count for hit, count in zip(hits, counts, strict=True) if count]


def share_won_back(candidate: Sequence[float], baseline: Sequence[float]) -> list[float]:
    """Of the agreement that a baseline loses, the share that a candidate has again, per depth (1 = all of it)."""
    return [(ours - base) / (1.0 - base) if base < 1.0 else 1.0 for ours, base in zip(candidate, baseline, strict=True)]
