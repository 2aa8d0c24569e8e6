"""Measures a trained family from its folders and writes the model card."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import Gemma4AssistantForCausalLM, Gemma4ForCausalLM

from hyco_export.nn.tiny.batches import Row
from hyco_export.nn.tiny.calibrate import activation_scales
from hyco_export.nn.tiny.configs import head_config, slm_config, verifier_config
from hyco_export.nn.tiny.measure import (
    mean_entropy,
    measure_chain,
    measure_head_agreement,
    measure_slm_agreement,
)


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
            "verifier": Gemma4ForCausalLM(verifier_config()),
            "head": Gemma4AssistantForCausalLM(head_config()),
            "slm": Gemma4ForCausalLM(slm_config()),
        }
    return {part: sum(p.numel() for p in model.parameters()) for part, model in models.items()}


def load_family(folder: Path) -> tuple[Gemma4ForCausalLM, Gemma4AssistantForCausalLM, Gemma4ForCausalLM]:
    """Verifier, head and packed SLM of a family, through transformers, in float32."""
    verifier = Gemma4ForCausalLM.from_pretrained(folder / "verifier", dtype=torch.float32)
    head = Gemma4AssistantForCausalLM.from_pretrained(folder / "head", dtype=torch.float32)
    slm = Gemma4ForCausalLM.from_pretrained(folder / "slm", dtype=torch.float32)
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
`hyco-export train-tiny OUT` makes these files again, bit for bit with the same versions of Python and the libraries on
the same kind of processor (one thread per process, seed {facts[seed]}). The verifier learns the text, then its final
norm is scaled so that it is nearly as certain as a large model; head and SLM learn from answers that it samples then.
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
