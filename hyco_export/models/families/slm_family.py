"""What a family of SLMs declares (`SlmFamily`), and the parts that families have in common.

A family is one module of this package with a value `FAMILY`; no other file names it, so that a new family is one new
module. It declares how a config becomes the static network (`core.network.slm`), how transformers' norms become that
network's, and which config fields are honoured (`config_fields`). Linear layers and embeddings have transformers' names
in every family.

Legend: d head dimension, n values of a norm.
"""

import importlib
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any

import numpy as np
from transformers import PreTrainedConfig, PreTrainedModel

from hyco_export.core.handoff import LayerType
from hyco_export.core.network.slm import SlmLayer, SlmNetwork
from hyco_export.errors import CheckpointError

# ---- names that transformers' models share

ATTENTION_NAMES: dict[LayerType, str] = {"sliding": "sliding_attention", "full": "full_attention"}
LONG_NAMES: dict[str, str] = dict(ATTENTION_NAMES.items())  # the same, for layer types that come from a file
SHORT_NAMES: dict[str, LayerType] = {name: short for short, name in ATTENTION_NAMES.items()}
MODEL_PREFIX = "model."
OUTPUT_LAYER = "lm_head"
TOKEN_TABLE = "model.embed_tokens"
PER_LAYER_TABLE = "model.embed_tokens_per_layer"
READS_KV = "reuse"  # transformers' mode of a layer that has no K/V of its own: every layer of a head
STORES_KV = "store"  # transformers' mode of a layer whose K/V other layers, and the head, may read
QUERY_NORM, KEY_NORM = ".q_norm", ".k_norm"

# ---- config fields that mean the same in every family

LAYERS, ROPE = "per_layer_config", "rope_parameters"
INERT = frozenset(  # of no effect on logits: training, generation, tokenizer, memory
    {
        *(each.name for each in fields(PreTrainedConfig)),
        *("initializer_range", "use_cache", "attention_dropout", "max_position_embeddings"),
        *("pad_token_id", "bos_token_id", "eos_token_id"),
    }
)
TEXT = frozenset(  # read by the surgery, or by transformers' empty model for the shapes of the tensors
    {
        *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
        *("num_key_value_heads", "head_dim", "rms_norm_eps", "tie_word_embeddings", ROPE),
    }
)
WINDOWED = frozenset({"layer_types", "sliding_window"})  # of families with sliding layers

Rings = Mapping[str, int]  # capacity by layer type
Vectors = Mapping[str, np.ndarray]  # float32 [n] by the name of a norm
ReadVector = Callable[[str], np.ndarray]  # a parameter or buffer of the checkpoint by transformers' name


@dataclass(frozen=True)
class Honoured:
    """`read`: fields of which every value is implemented or has no effect; `only`: the implemented values, by field."""

    read: frozenset[str]
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class SlmFamily:
    """One architecture of SLMs.

    Args:
        model_type: transformers' name of the text model.
        model: transformers' class.
        honoured: the config fields.
        network: text config, ring capacities and a reader of tensors -> the static network; raises CheckpointError for
            a part that is not implemented.
        norms: text config and norm weights as stored, without `model.` and `.weight` -> weights as the network
            multiplies by them, under its names.
        per_layer_width: text config -> width of one layer's part of the per-layer embeddings, 0 where there are none.
        per_layer_share: factor of the per-layer embeddings in their sum with the projected ones.
    """

    model_type: str
    model: type[PreTrainedModel]
    honoured: Honoured
    network: Callable[[Any, Rings, ReadVector], SlmNetwork]
    norms: Callable[[Any, Vectors], dict[str, np.ndarray]]
    per_layer_width: Callable[[Any], int] = lambda text: 0
    per_layer_share: float = 1.0


@cache
def slm_families() -> Mapping[str, SlmFamily]:
    """Every family of this package, by transformers' model type."""
    package = __name__.rpartition(".")[0]
    names = [found.name for found in pkgutil.iter_modules(importlib.import_module(package).__path__)]
    modules = [importlib.import_module(f"{package}.{name}") for name in sorted(names)]
    families: list[SlmFamily] = [module.FAMILY for module in modules if hasattr(module, "FAMILY")]
    return {family.model_type: family for family in families}


def find_family(config: PreTrainedConfig, checkpoint: object) -> SlmFamily:
    """The family of an SLM's text config.

    Raises:
        CheckpointError: none has this model type; names `checkpoint`.
    """
    families = slm_families()
    if config.model_type not in families:
        raise CheckpointError(
            f"{checkpoint} holds a {config.model_type!r} model, an SLM must be one of {', '.join(families)}",
            "correct $.models.slm",
        )
    return families[config.model_type]


# ---- what families are built of


def layer_types(text: Any) -> list[LayerType]:
    """Type of each layer; full attention in a config without the field."""
    names = getattr(text, "layer_types", None) or [ATTENTION_NAMES["full"]] * text.num_hidden_layers
    return [SHORT_NAMES[name] for name in names]


def kv_sources(text: Any) -> list[int]:
    """The layer whose K/V each layer reads: itself, or the last storing one of its type (`kv_sharing_modes`)."""
    types = layer_types(text)
    modes = getattr(text, "kv_sharing_modes", None) or [STORES_KV] * len(types)
    newest: dict[str, int] = {}
    sources = []
    for index, (layer_type, mode) in enumerate(zip(types, modes, strict=True)):
        if mode != READS_KV:
            newest[layer_type] = index
        sources.append(newest[layer_type])
    return sources


def plain_layers(text: Any) -> tuple[SlmLayer, ...]:
    """Layers of one size that all store their own K/V; values have no norm."""
    return tuple(
        SlmLayer(
            index=index,
            layer_type=layer_type,
            heads=text.num_attention_heads,
            kv_heads=text.num_key_value_heads,
            dim=text.head_dim,
            source=index,
            values_from_keys=False,
            scalar=1.0,
            values_normed=False,
        )
        for index, layer_type in enumerate(layer_types(text))
    )


def static_network(
    text: Any,
    rings: Rings,
    inv_freq: dict[str, tuple[float, ...]],
    layers: Sequence[SlmLayer],
    per_layer: int = 0,
    soft_cap: float | None = None,
    **options: Any,
) -> SlmNetwork:
    """The static network over rings of these capacities; `options`: fields of `SlmNetwork` that have defaults."""
    spans = {"sliding": getattr(text, "sliding_window", None), "full": None}
    types = sorted({layer.layer_type for layer in layers})
    return SlmNetwork(
        hidden=text.hidden_size,
        per_layer=per_layer,
        epsilon=text.rms_norm_eps,
        soft_cap=soft_cap,
        rings={layer_type: rings[layer_type] for layer_type in types},
        spans={layer_type: spans[layer_type] for layer_type in types},
        inv_freq=inv_freq,
        layers=tuple(layers),
        **options,
    )


def rotary_frequencies(rotary: Any) -> dict[str, tuple[float, ...]]:
    """[d/2] by layer type, from a rotary embedding of transformers that has a table for each.

    Raises:
        CheckpointError: cos and sin are multiplied by a factor, which the static network does not do.
    """
    return {SHORT_NAMES[name]: _frequencies(rotary, f"{name}_", f" of {name}") for name in rotary.layer_types}


def common_frequencies(rotary: Any, types: Sequence[str]) -> dict[str, tuple[float, ...]]:
    """The same from one that has a single table, for every layer type.

    Raises:
        CheckpointError: as `rotary_frequencies`.
    """
    return dict.fromkeys(sorted(set(types)), _frequencies(rotary, "", ""))


def _frequencies(rotary: Any, prefix: str, owner: str) -> tuple[float, ...]:
    factor = getattr(rotary, f"{prefix}attention_scaling")
    if factor != 1.0:
        raise CheckpointError(
            f"rope_parameters{owner} multiply cos and sin by {factor}, only 1 is implemented",
            "use a model whose rotary tables are not scaled",
        )
    return tuple(getattr(rotary, f"{prefix}inv_freq").double().tolist())


def scaled_query_norms(norms: Vectors, scale: float) -> dict[str, np.ndarray]:
    """Norm weights with the factor of attention scores in those of the queries, and key channels of equal size.

    A key channel much larger than the others would leave them little resolution in the 8-bit ring. The size of each
    channel moves to the queries, which have 16 bits: the scores are the same.
    """
    found = dict(norms)
    for query in [name for name in found if name.endswith(QUERY_NORM)]:
        key = query.removesuffix(QUERY_NORM) + KEY_NORM
        size = _pair_sizes(found[key])
        found[query], found[key] = found[query] * size * np.float32(scale), found[key] / size
    return found


def _pair_sizes(weight: np.ndarray) -> np.ndarray:
    """[d] of weight [d]: the greater magnitude of each two that rotation mixes, i and i + d/2; 1 where both are 0."""
    half = len(weight) // 2
    size = np.maximum(np.abs(weight[:half]), np.abs(weight[half:]))
    return np.tile(np.where(size > 0, size, np.float32(1.0)), 2)


def pre_norms_only(norms: Vectors) -> dict[str, np.ndarray]:
    """Norms of a block without norms after attention and MLP: transformers calls the one before the MLP
    `post_attention_layernorm`, the network `pre_feedforward_layernorm`."""
    return {name.replace("post_attention_layernorm", "pre_feedforward_layernorm"): norms[name] for name in norms}
