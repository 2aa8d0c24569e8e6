"""The created head: the assistant of Gemma 4 26B-A4B at its full size, 419.7 M parameters. Random weights."""

from pathlib import Path

import torch
from transformers import Gemma4AssistantConfig, Gemma4AssistantForCausalLM

from hyco_export.nn.created.scale import Scale
from hyco_export.nn.created.verifier import text_config
from hyco_export.nn.created.weights import Report, write_checkpoint
from hyco_export.nn.tiny.configs import head_generation_config


def write_head(folder: Path, scale: Scale, seed: int, report: Report) -> None:
    """Write the checkpoint into a new folder."""
    with torch.device("meta"):
        model = Gemma4AssistantForCausalLM(head_config(scale))
    write_checkpoint(model, folder, seed, head_generation_config(), report)


def head_config(scale: Scale) -> Gemma4AssistantConfig:
    """Every layer reads the verifier's K/V."""
    layers = len(scale.head.pattern)
    text = text_config(scale, scale.head, vocab_size_per_layer_input=0, num_kv_shared_layers=layers)
    return Gemma4AssistantConfig(text_config=text, backbone_hidden_size=scale.verifier.hidden)
