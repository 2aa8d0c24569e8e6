"""The weights that a converted SLM must have, one by one, derived from transformers' model of the checkpoint.

Deliberately independent of the code that writes them. Of a packed checkpoint transformers loads the tensors and its
quantizer unpacks them; of an unquantised one every weight must be the nearest integer under a scale that the clip
search can give.

Legend: N output channels, K inputs, V vocabulary, B bytes and S scales of a row.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from hyco_export.core.encodings import SMALLEST_SCALE, symmetric_limits
from hyco_export.core.network.weights import IntegerMatrix
from hyco_export.models.families.gemma4 import LanguageModel
from hyco_export.models.families.gemma4_packed import QuantizedEmbedding, QuantizedLinear, unpack_int2, unpack_int4


class StoredPair(NamedTuple):
    """Integers and their float32 scales."""

    integers: np.ndarray
    scales: np.ndarray


class ReferenceWeights(NamedTuple):
    """What every emitted weight must be, by module name: linears [N, K] and [N], embeddings [V, B] and [V, S]."""

    linears: Mapping[str, StoredPair]
    tables: Mapping[str, StoredPair]


class TrueLinears(Mapping[str, StoredPair]):
    """Every quantised linear by module name, int8 [N, K] and [N], unpacked when it is asked for.

    Args:
        stock: transformers' model.
        kept: by module name, the rows that count where not all do.
    """

    def __init__(self, stock: LanguageModel, kept: Mapping[str, np.ndarray]) -> None:
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


def true_tables(stock: LanguageModel) -> dict[str, StoredPair]:
    """Every quantised embedding by module name, still packed: [V, B] and [V, S]."""
    return {
        name: StoredPair(_numpy(module.embedding_quantized), _numpy(module.embedding_scale))
        for name, module in stock.named_modules()
        if isinstance(module, QuantizedEmbedding)
    }


def _unpacked(module: QuantizedLinear, stored: torch.Tensor) -> np.ndarray:
    if module.num_bits == 8:
        return _numpy(stored)
    unpack = unpack_int2 if module.num_bits == 2 else unpack_int4
    return _numpy(unpack(stored, module.in_features))


def _numpy(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().numpy()


# ---- unquantised checkpoints: the nearest integers

SLACK = 1e-6  # of a scale: one rounding of float32


class NearestLinears(Mapping[str, StoredPair]):
    """Every linear by module name, int8 [N, K] and [N], made when it is asked for.

    Args:
        stock: transformers' model in float32.
        kept: by module name, the rows that count where not all do.
        written: gives what was written by module name; its scales are judged, then used.
        ratios: least and greatest clip ratio of the search.
    """

    def __init__(
        self,
        stock: PreTrainedModel,
        kept: Mapping[str, np.ndarray],
        written: Callable[[str], IntegerMatrix],
        ratios: tuple[float, float],
    ) -> None:
        self._modules = {name: module for name, module in stock.named_modules() if isinstance(module, nn.Linear)}
        self._kept = kept
        self._written = written
        self._ratios = ratios

    def __getitem__(self, name: str) -> StoredPair:
        weight = self._modules[name].weight.detach()
        if name in self._kept:
            weight = weight[torch.from_numpy(self._kept[name].astype(np.int64))]
        return nearest(weight.numpy(), self._written(name), self._ratios)

    def __iter__(self) -> Iterator[str]:
        return iter(self._modules)

    def __len__(self) -> int:
        return len(self._modules)


def nearest(weight: np.ndarray, written: IntegerMatrix, ratios: tuple[float, float]) -> StoredPair:
    """Integers of weight [N, K] on the written grids; a scale that no clip ratio gives is replaced by the next one."""
    lowest, highest = symmetric_limits(written.bits)
    largest = np.abs(weight).max(axis=1) / np.float32(highest)
    least = np.maximum(largest * np.float32(ratios[0] * (1 - SLACK)), np.float32(SMALLEST_SCALE))
    most = np.maximum(largest * np.float32(ratios[1] * (1 + SLACK)), np.float32(SMALLEST_SCALE))
    scales = np.clip(written.scales, least, most)
    integers = np.clip(np.rint(weight / scales[:, None]), lowest, highest).astype(np.int8)
    return StoredPair(integers, scales)


def nearest_tables(stock: PreTrainedModel, scale_counts: Mapping[str, int]) -> dict[str, StoredPair]:
    """Embeddings by module name, 8 bits: int8 [V, D] and [V, S]; the largest magnitude under a scale is 127 of it."""
    _, highest = symmetric_limits(8)
    found = {}
    for name, count in scale_counts.items():
        weight = stock.get_parameter(f"{name}.weight").detach().numpy()
        blocks = weight.reshape(len(weight), count, -1)  # [V, S, D / S]
        scales = np.maximum(np.abs(blocks).max(axis=2) / np.float32(highest), np.float32(SMALLEST_SCALE))
        integers = np.rint(blocks / scales[..., None]).astype(np.int8)
        found[name] = StoredPair(integers.reshape(weight.shape), scales)
    return found
