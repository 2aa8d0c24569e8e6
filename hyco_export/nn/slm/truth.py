"""A checkpoint's weights through transformers' own eyes: what the emitted integers are compared with, one by one.

On purpose not the code that made them: transformers loads the tensors and its quantizer unpacks them
(`integrations/gemma_quant.py`). Legend: N output channels, K inputs, V vocabulary, B bytes and S scales of a row.
"""

from typing import NamedTuple

import numpy as np
import torch
from transformers import Gemma4ForCausalLM
from transformers.integrations.gemma_quant import QuantizedEmbedding, QuantizedLinear, _unpack_int2, _unpack_int4


class StoredPair(NamedTuple):
    """Integers and their float32 scales."""

    integers: np.ndarray
    scales: np.ndarray


def true_linears(stock: Gemma4ForCausalLM) -> dict[str, StoredPair]:
    """Every quantised linear by module name: int8 [N, K] and [N]."""
    return {
        name: StoredPair(_unpacked(module), _numpy(module.weight_scale)[:, 0])
        for name, module in stock.named_modules()
        if isinstance(module, QuantizedLinear)
    }


def true_tables(stock: Gemma4ForCausalLM) -> dict[str, StoredPair]:
    """Every quantised embedding by module name, still packed: [V, B] and [V, S]."""
    return {
        name: StoredPair(_numpy(module.embedding_quantized), _numpy(module.embedding_scale))
        for name, module in stock.named_modules()
        if isinstance(module, QuantizedEmbedding)
    }


def _unpacked(module: QuantizedLinear) -> np.ndarray:
    if module.num_bits == 8:
        return _numpy(module.weight)
    unpack = _unpack_int2 if module.num_bits == 2 else _unpack_int4
    return _numpy(unpack(module.weight, module.in_features))


def _numpy(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().numpy()
