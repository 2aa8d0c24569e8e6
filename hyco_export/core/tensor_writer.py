"""Writes one safetensors file piece by piece, where the library's own `save_file` wants every tensor in memory at once.

The bytes are those of `save_file` for the same tensors. Knows the file format (8 bytes of header length, JSON header,
data) and the types that checkpoints and artifacts here use; nothing of what the tensors mean.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

import numpy as np

TYPE_NAMES = {
    "float32": "F32",
    "int32": "I32",
    "int8": "I8",
    "uint8": "U8",
}  # in the order in which the library lays them out
HEADER_ALIGNMENT = 8


class Declared(NamedTuple):
    """Type (numpy's name) and shape of a tensor that will be written."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * np.dtype(self.dtype).itemsize


class TensorWriter:
    """A file under construction; a context manager.

    Args:
        path: the file to make.
        declared: every tensor by name.
        metadata: at most one key: the library keeps no order of several.

    Raises:
        ValueError: at the end, a tensor was not written whole.
    """

    def __init__(self, path: Path, declared: Mapping[str, Declared], metadata: Mapping[str, str]) -> None:
        ranks = list(TYPE_NAMES)
        self._declared = dict(sorted(declared.items(), key=lambda item: (ranks.index(item[1].dtype), item[0])))
        header, self._offsets = _header(self._declared, metadata)
        self._missing = {name: tensor.size_bytes for name, tensor in self._declared.items()}
        self._file = path.open("wb")
        self._file.write(header)

    def put(self, name: str, values: np.ndarray, first_row: int = 0) -> None:
        """Write the rows of `values` as rows `first_row`... of a tensor, or a whole tensor.

        Raises:
            ValueError: another type or another shape than declared.
        """
        wanted = self._declared[name]
        whole = first_row == 0 and values.shape == wanted.shape
        if values.dtype.name != wanted.dtype or not (whole or values.shape[1:] == wanted.shape[1:]):
            raise ValueError(f"{name} is {values.dtype} {values.shape}, declared as {wanted}")
        row_bytes = 0 if whole else wanted.size_bytes // wanted.shape[0]
        self._file.seek(self._offsets[name] + first_row * row_bytes)
        self._file.write(np.ascontiguousarray(values).data)
        self._missing[name] -= values.nbytes

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        unfinished = [name for name, count in self._missing.items() if count]
        if kind is None and unfinished:
            raise ValueError(f"{len(unfinished)} tensors were not written whole, first {unfinished[0]}")


def _header(declared: Mapping[str, Declared], metadata: Mapping[str, str]) -> tuple[bytes, dict[str, int]]:
    """The file's beginning, and where each tensor's bytes start in the file."""
    described: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    starts, position = {}, 0
    for name, tensor in declared.items():
        end = position + tensor.size_bytes
        starts[name] = position
        described[name] = {
            "dtype": TYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [position, end],
        }
        position = end
    text = json.dumps(described, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % HEADER_ALIGNMENT)
    data = HEADER_ALIGNMENT + len(text)
    return len(text).to_bytes(8, "little") + text, {name: data + start for name, start in starts.items()}
