"""The created verifier and head, and how created tensors are written. The hand-off has the shape of Gemma 4 26B-A4B's
(§3.1), the verifier's body is small and dense. Weights are random, and the same for equal seeds.

The verifier has no stop token: random weights would end an answer by chance, and the length of a run would vary.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from huggingface_hub.serialization import split_state_dict_into_shards_factory
from safetensors.torch import save_file
from transformers import GenerationConfig, PreTrainedModel

from hyco_export.dev.tiny.configs import BOS_ID, PAD_ID, SAMPLING, head_generation_config
from hyco_export.models.families.gemma4 import LanguageModel
from hyco_export.models.families.gemma4_assistant import HeadModel
from hyco_export.models.families.released_configs import Scale, head_config, verifier_config
from hyco_export.models.tensor_files import INDEX_NAME

# ---- random weights, shard by shard

SHARD_BYTES = 1 << 30  # the largest tensor (1.5 GB) has a shard of its own
CHUNK_ROWS = 16_384  # of a matrix drawn at a time in float32: 185 MB at 2,816 columns
DTYPE = torch.bfloat16
SHARD_NAME = "model{suffix}.safetensors"
LINEAR_SPREAD = 1.5  # of outputs for inputs of spread 1: layers matter beside the residual they are added to
READABLE = 0o644  # safetensors makes files that only their owner can read
NORM_LOW = 0.5  # norm weights lie in [0.5, 1.5) times their centre

Report = Callable[[float], None]
"""Called with the share of the bytes that is written, 0 to 1."""


def write_checkpoint(
    model: PreTrainedModel, folder: Path, seed: int, generation: GenerationConfig, report: Report
) -> None:
    """Configs and bfloat16 weights of a model on the meta device, as `save_pretrained` would lay them out."""
    folder.mkdir(parents=True)
    tied = _tied_names(model)
    tensors = {name: value.to(DTYPE) for name, value in model.state_dict().items() if name not in tied}
    generator = torch.Generator().manual_seed(seed)
    write_shards(folder, tensors, SHARD_BYTES, lambda name: drawn(name, tensors[name].shape, generator), report)
    model.config.architectures = [type(model).__name__]
    model.config.dtype = "bfloat16"
    model.config.save_pretrained(folder)
    generation.save_pretrained(folder)


def write_shards(
    folder: Path,
    empty: Mapping[str, torch.Tensor],
    shard_bytes: int,
    draw: Callable[[str], torch.Tensor],
    report: Report,
) -> None:
    """Write safetensors as `save_pretrained` would lay them out, with one shard at a time in memory.

    Args:
        empty: shapes and types by name, on the meta device.
        shard_bytes: a shard is written once it holds as much; a larger tensor has one alone.
        draw: a tensor's values by its name; called in the order in which they are written.
    """
    shards = split_state_dict_into_shards_factory(
        dict(empty), get_storage_size=_size_bytes, filename_pattern=SHARD_NAME, max_shard_size=shard_bytes
    )
    written, total = 0, sum(map(_size_bytes, empty.values()))
    for file, names in shards.filename_to_tensors.items():
        content = {}
        for name in names:
            content[name] = draw(name)
            written += _size_bytes(empty[name])
            report(written / total)
        save_file(content, folder / file, metadata={"format": "pt"})
        (folder / file).chmod(READABLE)
    if shards.is_sharded:
        index = {"metadata": shards.metadata, "weight_map": shards.tensor_to_filename}
        (folder / INDEX_NAME).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def drawn(name: str, shape: torch.Size, generator: torch.Generator) -> torch.Tensor:
    """One tensor in bfloat16.

    Matrices are normal: embeddings with spread K^-0.5, so that the factor K^0.5 of Gemma's embedding layer gives
    spread 1. Norm weights are around 1, those of queries around d^-0.5: Gemma 4 does not scale attention scores, and
    queries of full length would attend to one key alone. Layer scalars are 1.
    """
    if len(shape) < 2:
        return _vector(name, shape, generator)
    spread = shape[1] ** -0.5 if "embed_tokens" in name else LINEAR_SPREAD * shape[1] ** -0.5
    tensor = torch.empty(shape, dtype=DTYPE)
    for start in range(0, shape[0], CHUNK_ROWS):
        rows = tensor[start : start + CHUNK_ROWS]
        rows.copy_(torch.randn(rows.shape, generator=generator) * spread)  # [<= CHUNK_ROWS, K] in float32
    return tensor


def _vector(name: str, shape: torch.Size, generator: torch.Generator) -> torch.Tensor:
    if name.endswith("layer_scalar"):
        return torch.ones(shape, dtype=DTYPE)
    centre = shape[0] ** -0.5 if "q_norm" in name else 1.0
    return (centre * (NORM_LOW + torch.rand(shape, generator=generator))).to(DTYPE)


def _tied_names(model: PreTrainedModel) -> set[str]:
    """Parameters that are another one's storage, and are not written."""
    keys: dict[str, str] = getattr(model, "_tied_weights_keys", None) or {}
    return set(keys) if model.config.tie_word_embeddings else set()


def _size_bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def write_verifier(folder: Path, scale: Scale, seed: int, report: Report) -> None:
    """Write the checkpoint without its tokenizer into a new folder."""
    with torch.device("meta"):
        model = LanguageModel(verifier_config(scale))
    generation = GenerationConfig(pad_token_id=PAD_ID, bos_token_id=BOS_ID, **SAMPLING)
    write_checkpoint(model, folder, seed, generation, report)


# ---- the head: the assistant of Gemma 4 26B-A4B at its full size, 419.7 M parameters


def write_head(folder: Path, scale: Scale, seed: int, report: Report) -> None:
    """Write the checkpoint into a new folder."""
    with torch.device("meta"):
        model = HeadModel(head_config(scale))
    write_checkpoint(model, folder, seed, head_generation_config(), report)
