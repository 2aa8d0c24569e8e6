"""Packed Gemma 4 checkpoints (Google's mobile QAT release): transformers' quantizer and the layers that it puts in."""

from transformers import GemmaQuantizationConfig
from transformers.integrations.gemma_quant import (
    QuantizedEmbedding,
    QuantizedLinear,
    _unpack_int2,
    _unpack_int4,
    replace_with_quant_layers,
)

__all__ = [
    "PackingConfig",
    "QuantizedEmbedding",
    "QuantizedLinear",
    "replace_with_quant_layers",
    "unpack_int2",
    "unpack_int4",
]

PackingConfig = GemmaQuantizationConfig
unpack_int2 = _unpack_int2
unpack_int4 = _unpack_int4
