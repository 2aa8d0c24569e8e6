"""Writes an SLM checkpoint of Gemma 4 E2B's shape in the layout of the mobile QAT release, with random integers.

For runs at real size where the released weights cannot be fetched. The seed of a tensor depends on its name, so that no
two are equal (the NPU compiler merges equal ones). Which tensors a checkpoint holds is taken from transformers: its
quantizer applied to an empty model.
"""

import shutil
import zlib
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from scipy.stats import norm
from transformers import GenerationConfig

from hyco_export.core.encodings import pack_rows
from hyco_export.dev.created.models import Report, write_shards
from hyco_export.models.families.gemma4 import LanguageConfig, LanguageModel
from hyco_export.models.families.gemma4_packed import (
    PackingConfig,
    QuantizedEmbedding,
    QuantizedLinear,
    replace_with_quant_layers,
)
from hyco_export.models.families.released_configs import mobile_widths

SHARD_BYTES = 1_000_000_000  # the largest table, 1.2 GB at E2B size, has a shard of its own
TOKENIZER_PATTERNS = ("tokenizer*", "special_tokens_map.json", "chat_template*")
DRAWS = {2: 16, 4: 256, 8: 256}  # equally likely levels that one random value of a width is drawn from
SCORE_SPREAD = 1.0  # standard deviation of attention scores; at 16 random weights attend to one key alone
SCALAR_RANGE = (0.9, 1.0)  # of layer scalars: keeps the residual of dozens of layers at one size
BRANCH_SHARE = 0.3  # norms of what a layer adds; at 1 a random network of 35 layers amplifies every rounding
BRANCH_NORMS = (
    "post_attention_layernorm.weight",
    "post_feedforward_layernorm.weight",
    "post_per_layer_input_norm.weight",
)


def write_packed_slm(folder: Path, config: LanguageConfig, tokenizer: Path | None, seed: int, report: Report) -> None:
    """Write shards, index, configs and the tokenizer's files into the existing, empty `folder`.

    Args:
        tokenizer: folder with the files of a fast tokenizer; None leaves them out.
        seed: equal seeds give equal bytes.
    """
    settings = mobile_widths(config)
    with torch.device("meta"):
        model = LanguageModel(config)
        replace_with_quant_layers(model, settings, [])
    empty = model.state_dict() | _cache_scales(config)
    packed = {
        f"{name}.{'weight' if isinstance(module, QuantizedLinear) else 'embedding_quantized'}": module
        for name, module in model.named_modules()
        if isinstance(module, QuantizedLinear | QuantizedEmbedding)
    }
    write_shards(folder, empty, SHARD_BYTES, lambda name: _drawn(name, empty[name], packed, seed), report)
    _write_configs(folder, config, settings)
    for pattern in TOKENIZER_PATTERNS if tokenizer else ():
        for path in sorted((tokenizer or folder).glob(pattern)):
            shutil.copyfile(path, folder / path.name)


def _write_configs(folder: Path, config: LanguageConfig, settings: PackingConfig) -> None:
    stored = type(config).from_dict(config.to_dict())
    stored.architectures = [LanguageModel.__name__]
    stored.dtype = "float32"
    stored.quantization_config = settings.to_dict()
    stored.save_pretrained(folder)
    ids = {"pad_token_id": config.pad_token_id, "bos_token_id": config.bos_token_id}
    GenerationConfig(eos_token_id=config.eos_token_id, **ids).save_pretrained(folder)


def _cache_scales(config: LanguageConfig) -> dict[str, torch.Tensor]:
    """One scale per K and V cache of a layer that stores them; only other tools read these tensors."""
    storing = config.num_hidden_layers - config.num_kv_shared_layers
    names = (f"model.layers.{layer}.self_attn.{kind}_cache_scale" for layer in range(storing) for kind in ("k", "v"))
    return {name: torch.empty((), device="meta") for name in names}


def _drawn(
    name: str, like: torch.Tensor, packed: dict[str, QuantizedLinear | QuantizedEmbedding], seed: int
) -> torch.Tensor:
    """Random values that keep a deep network's activations near 1: rows of unit length, norms around 1."""
    generator = np.random.default_rng([seed, zlib.crc32(name.encode())])
    if name in packed:
        return torch.from_numpy(_random_packed(like, packed[name].num_bits, generator))
    if name.endswith(("weight_scale", "embedding_scale")):
        module = packed[_weight_of(name)]
        around_one = 0.5 + generator.random(like.shape, np.float32)
        columns = module.in_features if isinstance(module, QuantizedLinear) else module.embedding_dim
        return torch.from_numpy(around_one * np.float32(1.0 / (_deviation(module.num_bits) * columns**0.5)))
    if name.endswith(("activation_scale", "cache_scale")):
        return torch.tensor(0.02 + 0.06 * generator.random(), dtype=torch.float32)  # 8 bits over about +-2.5 to +-10
    if name.endswith("layer_scalar"):
        return torch.from_numpy(generator.uniform(*SCALAR_RANGE, like.shape).astype(np.float32))
    around_one = 0.5 + generator.random(like.shape, np.float32)
    return torch.from_numpy(around_one * np.float32(_norm_size(name, like.numel())))


def _norm_size(name: str, width: int) -> float:
    """Mean of a norm's weights."""
    if name.endswith("q_norm.weight"):
        return SCORE_SPREAD * width**-0.5
    return BRANCH_SHARE if name.endswith(BRANCH_NORMS) else 1.0


def _weight_of(scale: str) -> str:
    """Name of the integers that a scale tensor belongs to."""
    return scale.removesuffix("_scale").replace(".embedding", ".embedding_quantized")


def _random_packed(like: torch.Tensor, bits: int, generator: np.random.Generator) -> np.ndarray:
    """Packed bytes of the shape of `like`; each integer drawn from `levels`."""
    table = _byte_table(bits)
    stored = np.empty(tuple(like.shape), table.dtype)
    kind = np.uint8 if len(table) <= 256 else np.uint16
    for start in range(0, len(stored), 4096):  # rows: draws of 2 bytes a byte stay small beside the tensor
        part = stored[start : start + 4096]
        np.take(table, generator.integers(0, len(table), part.shape, kind), out=part)
    return stored


@lru_cache
def _byte_table(bits: int) -> np.ndarray:
    """Stored byte by draw: all combinations of equally likely levels of the values that share a byte."""
    values, per_byte = levels(bits), 8 // bits
    if per_byte == 1:
        return values
    draws = np.stack(np.meshgrid(*[values] * per_byte, indexing="ij"), -1).reshape(-1, per_byte)
    return pack_rows(draws, bits)[:, 0]


@lru_cache
def levels(bits: int) -> np.ndarray:
    """int8 [DRAWS]: equally likely values of mean 0, nearly a normal distribution on the grid of `bits` bits."""
    if bits == 2:
        return np.repeat(np.array([-2, -1, 0, 1], np.int8), [1, 4, 5, 6])
    quantiles = norm.ppf((np.arange(DRAWS[bits]) + 0.5) / DRAWS[bits])  # largest 2.9
    return np.rint(quantiles * (2 ** (bits - 1) - 1) / quantiles[-1]).astype(np.int8)


def _deviation(bits: int) -> float:
    """Standard deviation of the integers."""
    return float(levels(bits).std())
