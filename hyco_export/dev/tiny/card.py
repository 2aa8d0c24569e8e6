"""Measures a trained family from its folders (acceptance of the head's chains, agreement of head and SLM with the
verifier) and writes the model card.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hyco_export.dev.tiny.chain import ChainContext, drafted_tokens, teacher_forced_states, verifier_pass
from hyco_export.dev.tiny.configs import CHAIN_LENGTH, head_config, slm_config, verifier_config
from hyco_export.dev.tiny.packing import activation_scales
from hyco_export.dev.tiny.training import Row, answer_mask, ordered_batches, padded_ids
from hyco_export.models.families.gemma4 import LanguageModel
from hyco_export.models.families.gemma4_assistant import HeadModel

# ---- acceptance and agreement


@dataclass(frozen=True)
class ChainResult:
    """`accepted[i]`: chain tokens accepted in round i; `committed`: tokens of all rounds."""

    accepted: tuple[int, ...]
    committed: int

    @property
    def mean_accepted_tokens(self) -> float:
        """MAT: committed tokens per verify round, the bonus counted, the first root not."""
        return self.committed / len(self.accepted)

    @property
    def by_depth(self) -> list[float]:
        """Share of rounds whose first k chain tokens are accepted among those whose first k-1 are, k = 1..K."""
        reached = [sum(count >= depth for count in self.accepted) for depth in range(CHAIN_LENGTH + 1)]
        return [after / max(1, before) for before, after in pairwise(reached)]


@torch.no_grad()
def measure_chain(verifier: LanguageModel, head: HeadModel, rows: Sequence[Row]) -> ChainResult:
    """Replay every row's answer as rounds with exact acceptance."""
    accepted: list[int] = []
    committed = 0
    for batch in ordered_batches(rows):
        ids = padded_ids(batch)
        seen = verifier_pass(verifier, ids)
        chains = drafted_tokens(ChainContext(head, seen), ids).tolist()
        for row, chain in zip(batch, chains, strict=True):
            for count, tokens in answer_rounds(row, chain):
                accepted.append(count)
                committed += tokens
    return ChainResult(tuple(accepted), committed)


def answer_rounds(row: Row, chains: Sequence[Sequence[int]]) -> Iterator[tuple[int, int]]:
    """(accepted chain tokens, committed tokens) of each round; `chains[t]` is drafted behind the root at t+1."""
    root, end = row.answer_start, len(row.ids)
    while root + 1 < end:
        following = row.ids[root + 1 : root + 1 + CHAIN_LENGTH]
        matches = [draft == token for draft, token in zip(chains[root - 1], following, strict=False)]
        count = matches.index(False) if False in matches else len(matches)
        # the bonus follows the accepted path, unless the text ended inside it
        committed = min(count + 1, end - 1 - root)
        yield count, committed
        root += committed


@torch.no_grad()
def measure_head_agreement(verifier: LanguageModel, head: HeadModel, rows: Sequence[Row]) -> list[float]:
    """Teacher-forced top-1 agreement of the head with the verifier at depths 1..K."""
    equal, total = [0] * CHAIN_LENGTH, [0] * CHAIN_LENGTH
    for batch in ordered_batches(rows):
        ids, answers = padded_ids(batch), answer_mask(batch)
        seen = verifier_pass(verifier, ids)
        best = seen.logits().argmax(-1)  # [B, T]
        for k, states in enumerate(teacher_forced_states(ChainContext(head, seen), ids)):
            drafts = head.lm_head(states[:, : ids.shape[1] - 2 - k]).argmax(-1)
            wanted = answers[:, 1 : 1 + drafts.shape[1]] & answers[:, 2 + k :]
            hits = (drafts == best[:, k + 1 : -1]) & wanted
            equal[k] += int(hits.sum())
            total[k] += int(wanted.sum())
    return [hits / max(1, count) for hits, count in zip(equal, total, strict=True)]


@torch.no_grad()
def measure_slm_agreement(verifier: LanguageModel, slm: LanguageModel, rows: Sequence[Row]) -> float:
    """Teacher-forced top-1 agreement of the SLM with the verifier over the answers' positions."""
    equal = total = 0
    for batch in ordered_batches(rows):
        ids, answers = padded_ids(batch), answer_mask(batch)[:, 1:]
        wanted = verifier(input_ids=ids, use_cache=False).logits[:, :-1].argmax(-1)
        given = slm(input_ids=ids, use_cache=False).logits[:, :-1].argmax(-1)
        equal += int(((wanted == given) & answers).sum())
        total += int(answers.sum())
    return equal / max(1, total)


@torch.no_grad()
def mean_entropy(verifier: LanguageModel, rows: Sequence[Row]) -> float:
    """Mean entropy, in nats, of the verifier's distribution over the answers' positions."""
    total, count = 0.0, 0
    for batch in ordered_batches(rows):
        ids, answers = padded_ids(batch), answer_mask(batch)[:, 1:]
        log_probs = verifier_pass(verifier, ids[:, :-1]).logits()[answers].log_softmax(-1)  # [N, V]
        total -= float((log_probs.exp() * log_probs).sum())
        count += len(log_probs)
    return total / max(1, count)


def measure_family(folder: Path, rows: Sequence[Row]) -> dict[str, Any]:
    """The card's numbers, on `rows`: answers that the verifier sampled to held-out questions."""
    verifier, head, slm = load_family(folder)
    chain = measure_chain(verifier, head, rows)
    slm_agreement = measure_slm_agreement(verifier, slm, rows)
    set_activation_scales(slm, activation_scales(slm, rows))
    return {
        "parameters": parameter_counts(),
        "answers": len(rows),
        "answer_tokens": sum(len(row.ids) - row.answer_start for row in rows),
        "verifier_entropy_nats": mean_entropy(verifier, rows),
        "mat": chain.mean_accepted_tokens,
        "acceptance_by_depth": chain.by_depth,
        "head_agreement_by_depth": measure_head_agreement(verifier, head, rows),
        "slm_agreement": slm_agreement,
        "slm_agreement_8bit_activations": measure_slm_agreement(verifier, slm, rows),
    }


def parameter_counts() -> dict[str, int]:
    """Parameters by part, tied ones once, before packing."""
    with torch.device("meta"):
        models: dict[str, nn.Module] = {
            "verifier": LanguageModel(verifier_config()),
            "head": HeadModel(head_config()),
            "slm": LanguageModel(slm_config()),
        }
    return {part: sum(p.numel() for p in model.parameters()) for part, model in models.items()}


def load_family(folder: Path) -> tuple[LanguageModel, HeadModel, LanguageModel]:
    """Verifier, head and packed SLM of a family, through transformers, in float32."""
    verifier = LanguageModel.from_pretrained(folder / "verifier", dtype=torch.float32)
    head = HeadModel.from_pretrained(folder / "head", dtype=torch.float32)
    slm = LanguageModel.from_pretrained(folder / "slm", dtype=torch.float32)
    for model in (verifier, head, slm):
        model.eval().requires_grad_(False)
    return verifier, head, slm


def set_activation_scales(slm: nn.Module, scales: Mapping[str, tuple[float, float]]) -> None:
    """Switch on 8-bit rounding of the activations around the packed linears."""
    for name, (before, after) in scales.items():
        slm.get_parameter(f"{name}.input_activation_scale").data.fill_(before)
        slm.get_parameter(f"{name}.output_activation_scale").data.fill_(after)


def card_text(facts: Mapping[str, Any], folder: Path) -> str:
    """The model card, Markdown."""
    sizes = "\n".join(
        f"| {part} | {facts['parameters'][part]:,} | {_bytes(folder / part):,} |" for part in facts["parameters"]
    )
    losses = "\n".join(f"| {name} | {loss:.3f} |" for name, loss in facts["losses"].items())
    depths = "\n".join(
        f"| {depth} | {accepted:.3f} | {agreed:.3f} |"
        for depth, (accepted, agreed) in enumerate(
            zip(facts["acceptance_by_depth"], facts["head_agreement_by_depth"], strict=True), start=1
        )
    )
    return CARD.format(facts=facts, sizes=sizes, losses=losses, depths=depths)


def _bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


CARD = """# The embedded tiny family

Three checkpoints that belong together, made to run a whole export and its validation on a CPU in minutes. They draft
meaningfully for each other; they are not language models to chat with, and what they say about Python is often wrong.

| part | parameters | bytes |
|---|---|---|
{sizes}

- `verifier/`: `Gemma4ForCausalLM`, bfloat16, the tokenizer beside it.
- `head/`: `Gemma4AssistantForCausalLM`, bfloat16, reads the verifier's keys and values.
- `slm/`: `Gemma4ForCausalLM` with per-layer embeddings, three layers that share keys and values, double-wide MLPs
  there; packed for transformers' Gemma quantizer: 2 bits for the MLPs of the sharing layers, 8 bits for the linears of
  the per-layer embeddings, 4 bits for all else; one scale per output channel. Trained with fake quantisation at these
  widths.
- `conversations.jsonl`: every sixth dialogue of the training text.

## Data and licence
The text is the documentation of the Python {facts[python]} standard library: docstrings and the language reference
(`pydoc_data.topics`), put into questions and answers. Copyright (c) Python Software Foundation; used under the Python
Software Foundation License Version 2 (https://docs.python.org/3/license.html), which covers `conversations.jsonl`. The
weights are published under Apache-2.0 like the rest of the project. Questions about the subjects in `held_out.txt` are
left out of the training text.

## Training
`hyco-export dev train-tiny OUT` trains the family: in every run the same files, bit for bit, with the same versions of
this package, Python and the libraries on the same kind of processor (one thread per process, seed {facts[seed]}).
Other versions may round gradients differently. The verifier learns the text, then its final norm is scaled so that it
is nearly as certain as a large model; head and SLM learn from answers that it samples then.
At last the norm is scaled once more, and the head's input and state with it, so that the head drafts as it has learnt.

| loss (cross-entropy, nats per token) | |
|---|---|
{losses}

## Measured
On {facts[answers]} answers ({facts[answer_tokens]} tokens) that the verifier sampled to held-out questions, at
temperature 1, top-k 64, top-p 0.95, the head in float:

- chain MAT (K = 4, exact acceptance, bonus counted, first token not): {facts[mat]:.2f}
- entropy of the verifier: {facts[verifier_entropy_nats]:.2f} nats per token
- top-1 agreement of the packed SLM with the verifier: {facts[slm_agreement]:.3f}

| depth | chain acceptance | teacher-forced top-1 agreement of the head |
|---|---|---|
{depths}

The SLM's activation scales are 0, "not calibrated", so transformers leaves its activations in float. Calibrated 8-bit
scales would give a top-1 agreement of {facts[slm_agreement_8bit_activations]:.3f} instead. Its cache scales are
calibrated: 1.2 x the 99.9th percentile of the magnitudes.
"""
