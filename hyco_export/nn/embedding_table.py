"""The 8-bit embedding table of the kept tokens: rows of the verifier's input embedding, read without loading the model.

Legend: n kept tokens, H hidden size, V vocabulary size. Knows safetensors files and one scale per row; not which tokens
are kept.
"""

from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from hyco_export.core.encodings import symmetric_limits
from hyco_export.core.recipe import Dtype
from hyco_export.errors import CheckpointError

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
EMBEDDING_SUFFIX = "embed_tokens.weight"
CHUNK_ROWS = 8192  # 46 MB of bfloat16 at the 2,816 columns of Gemma 4 26B-A4B
_, INT8_MAX = symmetric_limits(8)


class EmbeddingSource(msgspec.Struct, frozen=True):
    """Where the input embedding lies: file, tensor name and shape [V, H]."""

    path: Path
    tensor: str
    vocab_size: int
    hidden: int


class QuantizedRows(NamedTuple):
    """real = integers * scale: integers int8 [n, H], scale float32 [n]."""

    integers: np.ndarray
    scale: np.ndarray


def find_embedding(folder: Path) -> EmbeddingSource:
    """The verifier's input embedding in a checkpoint folder, whether one file or sharded.

    Raises:
        CheckpointError: no safetensors, a damaged file, or not exactly one such tensor.
    """
    candidates = [(folder / file, name) for name, file in _tensor_files(folder) if _is_embedding(name)]
    if len(candidates) != 1:
        names = ", ".join(name for _, name in candidates) or "none"
        raise CheckpointError(
            f"{folder} must hold one text embedding (*.{EMBEDDING_SUFFIX}), found: {names}",
            "give the verifier's text checkpoint in Hugging Face's layout",
        )
    path, name = candidates[0]
    with _opened(path) as shard:
        vocab_size, hidden = shard.get_slice(name).get_shape()
    return EmbeddingSource(path, name, vocab_size, hidden)


def quantized_embedding(source: EmbeddingSource, ids: np.ndarray, dtype: Dtype) -> QuantizedRows:
    """8-bit rows of the tokens `ids` [n] (ascending), as the verifier's embedding layer gives them.

    transformers' `Gemma4TextScaledWordEmbedding` rounds its factor sqrt(H) to the weight's dtype and multiplies in it
    (bfloat16: 53 instead of 53.07 at H = 2,816), so the same is done here in the `dtype` the verifier runs in.
    """
    run_dtype = getattr(torch, dtype)
    factor = torch.tensor(source.hidden**0.5).to(run_dtype)
    integers = np.empty((len(ids), source.hidden), dtype=np.int8)
    scale = np.empty(len(ids), dtype=np.float32)
    with _opened(source.path) as shard:
        table = shard.get_slice(source.tensor)
        for start in range(0, source.vocab_size, CHUNK_ROWS):
            first, last = np.searchsorted(ids, (start, start + CHUNK_ROWS))
            if first == last:
                continue
            rows = table[start : start + CHUNK_ROWS][torch.from_numpy(ids[first:last].astype(np.int64) - start)]
            real = (rows.to(run_dtype) * factor).float().numpy()  # [<= CHUNK_ROWS, H]
            integers[first:last], scale[first:last] = quantize_rows(real)
    return QuantizedRows(integers, scale)


def quantize_rows(real: np.ndarray) -> QuantizedRows:
    """Symmetric 8 bits with one scale per row of real [n, H]: the largest magnitude of a row becomes 127."""
    magnitude = np.abs(real).max(axis=1)
    scale = np.maximum(magnitude / np.float32(INT8_MAX), np.finfo(np.float32).tiny).astype(np.float32)
    return QuantizedRows(np.rint(real / scale[:, None]).astype(np.int8), scale)


def _is_embedding(name: str) -> bool:
    """True for the text model's token table; vision and audio towers have tables of their own."""
    return name.endswith(f".{EMBEDDING_SUFFIX}") and not any(part in name for part in ("vision", "audio"))


def _tensor_files(folder: Path) -> list[tuple[str, str]]:
    """(tensor name, file name) of everything in the checkpoint."""
    index = folder / INDEX_NAME
    if index.is_file():
        try:
            return sorted(msgspec.json.decode(index.read_bytes())["weight_map"].items())
        except (msgspec.DecodeError, KeyError, TypeError) as error:
            raise CheckpointError(f"{index} is not a safetensors index", "fetch the checkpoint again") from error
    with _opened(folder / SINGLE_NAME) as shard:
        return [(name, SINGLE_NAME) for name in shard.keys()]  # noqa: SIM118 - a handle, not a dict


def _opened(path: Path) -> safe_open:
    """A safetensors file, open for slices.

    Raises:
        CheckpointError: it is missing, cut short or not safetensors.
    """
    try:
        return safe_open(path, framework="pt")
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} does not exist", "give a checkpoint folder with safetensors") from error
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is damaged: {error}", "fetch the checkpoint again") from error
