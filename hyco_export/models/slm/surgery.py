"""From a checkpoint to the static SLM: its shape, and its weights under the names the network uses.

Surgery (HyCo, Appendix A): integers and scales stay as they are; the output layer keeps the rows of the keep set;
constant factors move into norm weights (see `core.network.slm`). Knows what Gemma 4 models are made of (Gemma 3:
`nn.slm.gemma3`) and what a checkpoint must give (`SlmCheckpoint`); no file layout, no graph.
"""

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding
from transformers.models.gemma4.modeling_gemma4 import Gemma4TextRotaryEmbedding

from hyco_export.core.network.slm import SlmLayer, SlmNetwork
from hyco_export.core.network.weights import MatrixShape, PackedMatrices, PackedMatrix, Weights
from hyco_export.core.tables import PER_LAYER, TOKENS, PackedRows
from hyco_export.errors import CheckpointError
from hyco_export.models.families.config_fields import require_honoured
from hyco_export.models.verifier import ATTENTION_NAMES

# What Gemma 3 and Gemma 4 text models, and heads, name alike: layer types and their rotary frequencies.


LONG_NAMES: dict[str, str] = dict(ATTENTION_NAMES.items())  # our layer types -> transformers'
SHORT_NAMES = {name: short for short, name in LONG_NAMES.items()}


def rotary_frequencies(rotary: Any) -> dict[str, tuple[float, ...]]:
    """[d/2] by layer type, from transformers' own rotary embedding of the model, whatever kind each type has.

    Raises:
        CheckpointError: cos and sin are multiplied by a factor, which the static network does not do.
    """
    frequencies = {}
    for layer_type in rotary.layer_types:
        factor = getattr(rotary, f"{layer_type}_attention_scaling")
        if factor != 1.0:
            raise CheckpointError(
                f"rope_parameters of {layer_type} multiply cos and sin by {factor}, only 1 is implemented",
                "use a model whose rotary tables are not scaled",
            )
        frequencies[SHORT_NAMES[layer_type]] = tuple(getattr(rotary, f"{layer_type}_inv_freq").double().tolist())
    return frequencies


# Gemma 3 text models as the static SLM: their shape, and their norms as the network applies them.


GEMMA3 = "gemma3_text"  # transformers' model type
QUERY_NORM, KEY_NORM = ".q_norm", ".k_norm"


def gemma3_network(text: Any, rings: dict[str, int]) -> SlmNetwork:
    """The static network of a Gemma 3 text config over rings of these capacities (by `sliding` and `full`).

    Raises:
        CheckpointError: the model has a part that the static network does not.
    """
    require_honoured(text, "SLM")
    types = [SHORT_NAMES[layer_type] for layer_type in text.layer_types]
    spans = {"sliding": text.sliding_window, "full": None}
    return SlmNetwork(
        hidden=text.hidden_size,
        per_layer=0,
        epsilon=text.rms_norm_eps,
        soft_cap=text.final_logit_softcapping,
        rings={layer_type: rings[layer_type] for layer_type in sorted(set(types))},
        spans={layer_type: spans[layer_type] for layer_type in sorted(set(types))},
        inv_freq=rotary_frequencies(Gemma3RotaryEmbedding(text)),
        layers=tuple(
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
            for index, layer_type in enumerate(types)
        ),
    )


def gemma3_vectors(text: Any, vectors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Norm weights [n] by name as factors; the same scores from keys of even size."""
    factors = {name: np.float32(1.0) + weight for name, weight in vectors.items()}
    scale = np.float32(text.query_pre_attn_scalar**-0.5)
    for query in [name for name in factors if name.endswith(QUERY_NORM)]:
        key = query.removesuffix(QUERY_NORM) + KEY_NORM
        size = _pair_sizes(factors[key])
        factors[query], factors[key] = factors[query] * size * scale, factors[key] / size
    return factors


def _pair_sizes(weight: np.ndarray) -> np.ndarray:
    """[d] of weight [d]: the greater magnitude of each two that rotation mixes, i and i + d/2; 1 where both are 0."""
    half = len(weight) // 2
    size = np.maximum(np.abs(weight[:half]), np.abs(weight[half:]))
    return np.tile(np.where(size > 0, size, np.float32(1.0)), 2)


MODEL_PREFIX = "model."
OUTPUT_LAYER = "lm_head"
TOKEN_TABLE = "model.embed_tokens"
PER_LAYER_TABLE = "model.embed_tokens_per_layer"
PER_LAYER_NORM = "per_layer_projection_norm"
PER_LAYER_SHARE = 2.0**-0.5  # `Gemma4TextModel.per_layer_input_scale`: keeps the variance of a sum of two


class SlmCheckpoint(Protocol):
    """Where an SLM's parts come from, by the module and tensor names of transformers' model."""

    @property
    def config(self) -> Any:
        """The text model's."""
        ...

    @property
    def vectors(self) -> Collection[str]:
        """Names of norm weights and stored buffers."""
        ...

    @property
    def linears(self) -> Mapping[str, MatrixShape]:
        """Every linear layer, the output layer among them."""
        ...

    def matrix(self, name: str, rows: np.ndarray | None = None) -> PackedMatrix:
        """One linear layer, all its output channels or `rows` (ascending); read, or quantised, at every call."""
        ...

    def vector(self, name: str) -> np.ndarray:
        """float32."""
        ...

    def table(self, name: str, extra_factor: float = 1.0) -> PackedRows:
        """One embedding with its own factor times `extra_factor`, for the host."""
        ...


def slm_network(checkpoint: SlmCheckpoint, rings: dict[str, int]) -> SlmNetwork:
    """The static network of a checkpoint over rings of these capacities (by `sliding` and `full`).

    Raises:
        CheckpointError: the model has a part that the static network does not.
    """
    text: Any = checkpoint.config
    if text.model_type == GEMMA3:
        return gemma3_network(text, rings)
    require_honoured(text, "SLM")
    if text.num_hidden_layers <= text.num_kv_shared_layers:
        raise CheckpointError(
            f"the SLM cannot run as a static graph: num_kv_shared_layers is {text.num_kv_shared_layers} of "
            f"{text.num_hidden_layers} layers, one must store keys and values",
            "use a language model: a head reads another model's",
        )
    sources = _kv_sources(text)
    types = [SHORT_NAMES[layer_type] for layer_type in text.layer_types]
    layers = tuple(
        SlmLayer(
            index=index,
            layer_type=layer_type,
            heads=text.num_attention_heads,
            kv_heads=text.per_layer_config[index].num_key_value_heads,
            dim=text.per_layer_config[index].head_dim,
            source=sources[index],
            values_from_keys=text.attention_k_eq_v and layer_type == "full",
            scalar=float(checkpoint.vector(f"{MODEL_PREFIX}layers.{index}.layer_scalar").item()),
        )
        for index, layer_type in enumerate(types)
    )
    spans = {"sliding": text.sliding_window, "full": None}
    return SlmNetwork(
        hidden=text.hidden_size,
        per_layer=text.hidden_size_per_layer_input or 0,
        epsilon=text.rms_norm_eps,
        soft_cap=text.final_logit_softcapping,
        rings={layer_type: rings[layer_type] for layer_type in sorted(set(types))},
        spans={layer_type: spans[layer_type] for layer_type in sorted(set(types))},
        inv_freq=rotary_frequencies(Gemma4TextRotaryEmbedding(text)),
        layers=layers,
    )


def slm_weights(checkpoint: SlmCheckpoint, kept: np.ndarray) -> Weights:
    """Weights by the network's names; the output layer has the rows of the token ids `kept` [V] only.

    Linear layers are read from the checkpoint when they are asked for.
    """
    modules = {name.removeprefix(MODEL_PREFIX): name for name in checkpoint.linears}
    shapes = {name: checkpoint.linears[module] for name, module in modules.items()}
    shapes[OUTPUT_LAYER] = replace(shapes[OUTPUT_LAYER], rows=len(kept))

    def read(name: str) -> PackedMatrix:
        return checkpoint.matrix(modules[name], kept if name == OUTPUT_LAYER else None)

    return Weights(PackedMatrices(shapes, read), network_vectors(checkpoint), {})


def network_vectors(checkpoint: SlmCheckpoint) -> dict[str, np.ndarray]:
    """Norm weights by the network's names, constant factors inside."""
    vectors = {
        name.removeprefix(MODEL_PREFIX).removesuffix(".weight"): checkpoint.vector(name)
        for name in checkpoint.vectors
        if name.endswith(".weight")
    }
    if checkpoint.config.model_type == GEMMA3:
        vectors = gemma3_vectors(checkpoint.config, vectors)
    if PER_LAYER_NORM in vectors:
        vectors[PER_LAYER_NORM] = vectors[PER_LAYER_NORM] * np.float32(PER_LAYER_SHARE)
    return vectors


def host_tables(checkpoint: SlmCheckpoint) -> dict[str, PackedRows]:
    """The embedding tables that stay on the host, still packed."""
    tables = {TOKENS: checkpoint.table(TOKEN_TABLE)}
    if getattr(checkpoint.config, "hidden_size_per_layer_input", None):
        tables[PER_LAYER] = checkpoint.table(PER_LAYER_TABLE, PER_LAYER_SHARE)
    return tables


def _kv_sources(text: Any) -> list[int]:
    """By layer, the one whose K/V it reads: itself, or the last storing layer of its type (`kv_sharing_modes`)."""
    newest: dict[str, int] = {}
    sources = []
    for index, (layer_type, mode) in enumerate(zip(text.layer_types, text.kv_sharing_modes, strict=True)):
        if mode != "reuse":
            newest[layer_type] = index
        sources.append(newest[layer_type])
    return sources
