"""The 8-bit embedding table of the kept tokens: rows of the verifier's input embedding with one scale each.

Rows are read from the checkpoint's files; the model is not loaded.

Legend: n kept tokens, H hidden size, V vocabulary size.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from hyco_export.core.encodings import QuantizedRows, quantize_rows
from hyco_export.core.recipe import Dtype
from hyco_export.errors import CheckpointError
from hyco_export.models.tensor_files import TensorFiles

if TYPE_CHECKING:
    import torch

EMBEDDING_SUFFIX = ".embed_tokens.weight"
CHUNK_ROWS = 512  # 6 MB of float32 at the 2,816 columns of Gemma 4 26B-A4B


@dataclass(frozen=True)
class EmbeddingSource:
    """The tensor of the input embedding [V, H] and its files."""

    files: TensorFiles
    tensor: str
    vocab_size: int
    hidden: int


def find_embedding(folder: Path) -> EmbeddingSource:
    """The verifier's input embedding in a checkpoint folder of one or several files.

    Raises:
        CheckpointError: no safetensors, a damaged file, or not exactly one such tensor.
    """
    files = TensorFiles(folder)
    names = sorted(name for name in files.names if _is_embedding(name))
    if len(names) != 1:
        raise CheckpointError(
            f"{folder} must hold one text embedding (*{EMBEDDING_SUFFIX}), found: {', '.join(names) or 'none'}",
            "give the verifier's text checkpoint in Hugging Face's layout",
        )
    vocab_size, hidden = files.shape(names[0])
    return EmbeddingSource(files, names[0], vocab_size, hidden)


def scaled_row(source: EmbeddingSource, token: int, dtype: Dtype) -> "torch.Tensor":
    """The embedding [H] of one token as the verifier's layer gives it in `dtype`."""
    return _scaled(source, source.files.rows(source.tensor, token, token + 1), dtype)[0]


def quantized_embedding(source: EmbeddingSource, ids: np.ndarray, dtype: Dtype) -> QuantizedRows:
    """All `quantized_blocks` together."""
    integers = np.empty((len(ids), source.hidden), dtype=np.int8)
    scale = np.empty(len(ids), dtype=np.float32)
    for first, block in quantized_blocks(source, ids, dtype):
        last = first + len(block.scale)
        integers[first:last], scale[first:last] = block
    return QuantizedRows(integers, scale)


def quantized_blocks(source: EmbeddingSource, ids: np.ndarray, dtype: Dtype) -> Iterator[tuple[int, QuantizedRows]]:
    """8-bit rows of the tokens `ids` [n] (ascending), as the verifier's embedding layer gives them in `dtype`.

    In blocks, each with the index of its first row in `ids`.
    """
    for start in range(0, source.vocab_size, CHUNK_ROWS):
        first, last = np.searchsorted(ids, (start, start + CHUNK_ROWS))
        if first == last:
            continue
        chunk = source.files.rows(source.tensor, start, start + CHUNK_ROWS)[ids[first:last] - start]
        real = _scaled(source, chunk, dtype).float().numpy()  # [<= CHUNK_ROWS, H]
        yield int(first), quantize_rows(real)


def _scaled(source: EmbeddingSource, rows: np.ndarray, dtype: Dtype) -> "torch.Tensor":
    """Rows [n, H] as the verifier's embedding layer gives them when it runs in `dtype`.

    transformers' `Gemma4TextScaledWordEmbedding` rounds its factor sqrt(H) to the weight's dtype and multiplies in it
    (bfloat16: 53 instead of 53.07 at H = 2,816), so the same is done here.
    """
    import torch  # hundreds of MB that finding the table does without

    run_dtype = getattr(torch, dtype)
    factor = torch.tensor(source.hidden**0.5).to(run_dtype)
    return torch.from_numpy(rows).to(run_dtype) * factor


def _is_embedding(name: str) -> bool:
    """Is it the text model's token table? Vision and audio towers have tables of their own."""
    return name.endswith(EMBEDDING_SUFFIX) and not any(part in name for part in ("vision", "audio"))
