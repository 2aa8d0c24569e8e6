"""Shapes of a family's models from their configs: transformers builds each on the meta device, without any weight.

Knows configs, read from a folder or known by a Hub id (`nn.known_configs`); reads no tensor.
"""

from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import nn
from transformers import Gemma4AssistantForCausalLM, Gemma4ForCausalLM, GemmaQuantizationConfig, PreTrainedConfig
from transformers.integrations.gemma_quant import QuantizedEmbedding, QuantizedLinear, replace_with_quant_layers

from hyco_export.core.handoff import LayerType
from hyco_export.core.sizes.shapes import HeadShape, KvLayer, Matrix, SlmShape, VerifierShape
from hyco_export.nn.verifier import ATTENTION_NAMES, handoff_layers, layer_kv_shape

OUTPUT_LAYER = "lm_head"
LAYER_PREFIX = "model.layers."
SHORT_NAMES: dict[str, LayerType] = {name: short for short, name in ATTENTION_NAMES.items()}
REUSED = "reuse"  # transformers' mode of a layer that reads another one's K/V
UNPACKED_BITS = 16  # of weights in a checkpoint that is not quantised


def verifier_shape(config: PreTrainedConfig) -> VerifierShape:
    """The text model alone: towers for images and sound are not loaded."""
    text = config.get_text_config()
    with torch.device("meta"):
        model = Gemma4ForCausalLM(cast(Any, text))
    kv = {layer_type: _kv_layer(text, index) for layer_type, index in handoff_layers(config).items()}
    return VerifierShape(
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        hidden=text.hidden_size,
        vocab_size=text.vocab_size,
        sliding=kv["sliding"],
        full=kv["full"],
    )


def head_shape(config: PreTrainedConfig) -> HeadShape:
    """The assistant's linear layers and norms."""
    text = config.get_text_config()
    with torch.device("meta"):
        model = Gemma4AssistantForCausalLM(cast(Any, config))
    return HeadShape(
        width=text.hidden_size,
        vocab_size=text.vocab_size,
        layers=text.num_hidden_layers,
        matrices=tuple(
            Matrix(module.out_features, module.in_features, UNPACKED_BITS)
            for name, module in model.named_modules()
            if isinstance(module, nn.Linear) and name != OUTPUT_LAYER
        ),
        norm_values=_vector_values(model),
    )


def slm_shape(config: PreTrainedConfig) -> SlmShape:
    """The SLM's linear layers and tables, packed where the config says so."""
    text: Any = config.get_text_config()
    settings = _quantizer(config)
    with torch.device("meta"):
        model = Gemma4ForCausalLM(cast(Any, text))
        if settings is not None:
            replace_with_quant_layers(model, settings, settings.modules_to_not_convert)
    modes = text.kv_sharing_modes
    storing = [index for index, mode in enumerate(modes) if mode != REUSED]
    linears = dict(_linears(model, storing[-1]))
    output = linears.pop(OUTPUT_LAYER)
    tables = tuple(_tables(model))
    return SlmShape(
        hidden=text.hidden_size,
        per_layer_width=(text.hidden_size_per_layer_input or 0) * text.num_hidden_layers,
        vocab_size=text.vocab_size,
        output_bits=output.bits,
        layers=text.num_hidden_layers,
        matrices=tuple(linears.values()),
        tables=tables,
        table_scales=sum(
            module.embedding_scale.numel() for module in model.modules() if isinstance(module, QuantizedEmbedding)
        ),
        norm_values=_vector_values(model),
        storing=tuple(_kv_layer(text, index) for index in storing),
    )


def _quantizer(config: PreTrainedConfig) -> GemmaQuantizationConfig | None:
    """None for a checkpoint that is not quantised. Nothing is judged here: `convert-slm` does."""
    raw = getattr(config, "quantization_config", None)
    if raw is None:
        return None
    settings = dict(raw) if isinstance(raw, dict) else raw.to_dict()
    settings.pop("quant_method", None)
    settings["modules_to_not_convert"] = settings.get("modules_to_not_convert") or []  # None would skip the output
    return GemmaQuantizationConfig(**settings)


def _linears(model: nn.Module, last_storing: int) -> Iterator[tuple[str, Matrix]]:
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | QuantizedLinear):
            bits = module.num_bits if isinstance(module, QuantizedLinear) else UNPACKED_BITS
            yield name, Matrix(module.out_features, module.in_features, bits, _in_prefill(name, last_storing))


def _in_prefill(name: str, last_storing: int) -> bool:
    """A prefill pass ends with the K and V projections of the last storing layer."""
    if not name.startswith(LAYER_PREFIX):
        return name != OUTPUT_LAYER
    index = int(name.removeprefix(LAYER_PREFIX).partition(".")[0])
    return index < last_storing or (index == last_storing and name.endswith((".k_proj", ".v_proj")))


def _tables(model: nn.Module) -> Iterator[Matrix]:
    for module in model.modules():
        if isinstance(module, QuantizedEmbedding | nn.Embedding):
            bits = module.num_bits if isinstance(module, QuantizedEmbedding) else UNPACKED_BITS
            yield Matrix(module.num_embeddings, module.embedding_dim, bits)


def _vector_values(model: nn.Module) -> int:
    """Values of all norms."""
    return sum(parameter.numel() for parameter in model.parameters() if parameter.ndim == 1)


def _kv_layer(text: Any, index: int) -> KvLayer:
    shape = layer_kv_shape(text, index)
    return KvLayer(SHORT_NAMES[text.layer_types[index]], shape.heads, shape.dim)
