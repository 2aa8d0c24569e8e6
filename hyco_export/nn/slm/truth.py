"""A checkpoint's weights through transformers' own eyes: what the emitted integers are compared with, one by one.

On purpose not the code that made them: transformers loads the tensors and its quantizer unpacks them
(`integrations/gemma_quant.py`). Legend: N output channels, K inputs, V vocabulary, B bytes and S scales of a row.
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np
import torch
from transformers import Gemma4ForCausalLM
from transformers.integrations.gemma_quant import QuantizedEmbedding, QuantizedLinear, _unpack_int2, _unpack_int4


class StoredPair(NamedTuple):
    """Integers and their float32 scales."""

    integers: np.ndarray
    scales: np.ndarray


class Truth(NamedTuple):
    """What every emitted weight must be, by module name: linears [N, K] and [N], embeddings [V, B] and [V, S]."""

    linears: Mapping[str, StoredPair]
    tables: Mapping[str, StoredPair]


class TrueLinears(Mapping[str, StoredPair]):
    """Every quantised linear by module name, int8 [N, K] and [N], unpacked when it is asked for.

    Args:
        stock: transformers' model.
        kept: by module name, the rows that count where not all do.
    """

    def __init__(self, stock: Gemma4ForCausalLM, kept: Mapping[str, np.ndarray]) -> None:
        self._kept = kept
        self._modules = {name: module for name, module in stock.named_modules() if isinstance(module, QuantizedLinear)}

    def __getitem__(self, name: str) -> StoredPair:
        module = self._modules[name]
        stored, scales = module.weight, module.weight_scale[:, 0]
        if name in self._kept:
            rows = torch.from_numpy(self._kept[name].astype(np.int64))
            stored, scales = stored[rows], scales[rows]
        return StoredPair(_unpacked(module, stored), _numpy(scales))

    def __iter__(self) -> Iterator[str]:
        return iter(self._modules)

    def __len__(self) -> int:
        return len(self._modules)


def true_tables(stock: Gemma4ForCausalLM) -> dict[str, StoredPair]:
    """Every quantised embedding by module name, still packed: [V, B] and [V, S]."""
    return {
        name: StoredPair(_numpy(module.embedding_quantized), _numpy(module.embedding_scale))
        for name, module in stock.named_modules()
        if isinstance(module, QuantizedEmbedding)
    }


def _unpacked(module: QuantizedLinear, stored: torch.Tensor) -> np.ndarray:
    if module.num_bits == 8:
        return _numpy(stored)
    unpack = _unpack_int2 if module.num_bits == 2 else _unpack_int4
    return _numpy(unpack(stored, module.in_features))


def _numpy(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().numpy()
