"""Sizes of a verifier, a head and an SLM from their configs, for estimates.

transformers builds each model on the meta device, without weights. Configs come from checkpoint folders or are those of
released models (`families.released_configs`).
"""

from collections.abc import Sequence
from typing import Any

import msgspec
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig

from hyco_export.core.estimates.shapes import HeadShape, KvLayer, Matrix, SlmShape, VerifierShape
from hyco_export.models.families.gemma4_assistant import CENTROIDS, HeadModel
from hyco_export.models.families.slm_family import MODEL_PREFIX, OUTPUT_LAYER, find_family, kv_sources, layer_types
from hyco_export.models.slm.float import FloatModule, Rounding, float_modules, require_rounding
from hyco_export.models.slm.packed import PackedModule, empty_quantised, packed_modules
from hyco_export.models.verifier import empty_model, handoff_layers, layer_kv_shape

LAYER_PREFIX = f"{MODEL_PREFIX}layers."
Module = PackedModule | FloatModule
UNPACKED_BITS = 16  # of weights in a checkpoint that is not quantised


def verifier_shape(config: PreTrainedConfig) -> VerifierShape:
    """A verifier's text model; its towers for images and sound are not loaded."""
    text = config.get_text_config()
    handoff = tuple(_kv_layer(text, index) for index in handoff_layers(config).values())
    return msgspec.structs.replace(language_model_shape(config), handoff=handoff)


def language_model_shape(config: PreTrainedConfig) -> VerifierShape:
    """A language model of any family that hands nothing off: the verifier of a recipe without a head."""
    text = config.get_text_config()
    model = empty_model(AutoModelForCausalLM.from_config, text)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return VerifierShape(parameters, text.hidden_size, text.vocab_size, handoff=())


def head_shape(config: PreTrainedConfig) -> HeadShape:
    """A head's linear layers and norms."""
    text = config.get_text_config()
    model = empty_model(HeadModel, config)
    return HeadShape(
        width=text.hidden_size,
        vocab_size=text.vocab_size,
        layers=text.num_hidden_layers,
        matrices=tuple(
            Matrix(module.out_features, module.in_features, UNPACKED_BITS)
            for name, module in model.named_modules()
            if isinstance(module, nn.Linear) and name != OUTPUT_LAYER and not name.startswith(CENTROIDS)
        ),
        norm_values=_vector_values(model),
    )


def slm_shape(config: PreTrainedConfig, rounding: Rounding | None = None) -> SlmShape:
    """The SLM's linear layers and tables: packed as the config says, or rounded as the recipe says.

    Raises:
        CheckpointError: the config says it is packed and the recipe rounds it, or neither does.
    """
    require_rounding(config, config.name_or_path or config.model_type, rounding)
    text: Any = config.get_text_config()
    modules, vector_values = _rounded(text, rounding) if rounding else _packed(config)
    storing = [index for index, source in enumerate(kv_sources(text)) if source == index]
    linears = {
        module.name: Matrix(module.rows, module.columns, module.bits, _in_prefill(module.name, storing[-1]))
        for module in modules
        if module.factor is None
    }
    output = linears.pop(OUTPUT_LAYER)
    tables = [module for module in modules if module.factor is not None]
    return SlmShape(
        hidden=text.hidden_size,
        per_layer_width=find_family(text, config.name_or_path).per_layer_width(text) * text.num_hidden_layers,
        vocab_size=text.vocab_size,
        output_bits=output.bits,
        layers=text.num_hidden_layers,
        matrices=tuple(linears.values()),
        tables=tuple(Matrix(table.rows, table.columns, table.bits) for table in tables),
        table_scales=sum(table.rows * table.scales for table in tables),
        norm_values=vector_values,
        storing=tuple(_kv_layer(text, index) for index in storing),
        float_values=language_model_shape(config).parameters if rounding else 0,
    )


def _packed(config: PreTrainedConfig) -> tuple[Sequence[Module], int]:
    """Modules, and the number of values of all norms, of a checkpoint in the mobile QAT layout."""
    model = empty_quantised(config)
    return packed_modules(model), _vector_values(model)


def _rounded(text: PreTrainedConfig, rounding: Rounding) -> tuple[Sequence[Module], int]:
    """The same of an unquantised checkpoint."""
    model = empty_model(AutoModelForCausalLM.from_config, text)
    return float_modules(model, rounding), _vector_values(model)


def _in_prefill(name: str, last_storing: int) -> bool:
    """Is a module computed in prefill, which ends with the K and V projections of the last storing layer?"""
    if not name.startswith(LAYER_PREFIX):
        return name != OUTPUT_LAYER
    index = int(name.removeprefix(LAYER_PREFIX).partition(".")[0])
    return index < last_storing or (index == last_storing and name.endswith((".k_proj", ".v_proj")))


def _vector_values(model: nn.Module) -> int:
    """The number of values of all norms."""
    return sum(parameter.numel() for parameter in model.parameters() if parameter.ndim == 1)


def _kv_layer(text: Any, index: int) -> KvLayer:
    shape = layer_kv_shape(text, index)
    return KvLayer(layer_types(text)[index], shape.heads, shape.dim)
