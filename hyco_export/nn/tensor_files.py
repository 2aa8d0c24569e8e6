"""Tensors of a checkpoint folder by name, read one at a time from one or several safetensors files.

Knows files and shards; nothing of what the tensors mean.
"""

from pathlib import Path

import msgspec
import numpy as np
from safetensors import SafetensorError, safe_open

from hyco_export.errors import CheckpointError

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
FETCH_HINT = "fetch or save the checkpoint again"


class TensorFiles:
    """Opened shards of one folder.

    Raises:
        CheckpointError: no safetensors, a shard missing, cut short or damaged; names the file.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._shards = {name: _opened(folder / name) for name in sorted(set(_file_names(folder)))}
        self._owner = {tensor: name for name, shard in self._shards.items() for tensor in shard.keys()}  # noqa: SIM118

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._owner)

    def shape(self, name: str) -> tuple[int, ...]:
        """Raises CheckpointError: no such tensor."""
        return tuple(self._shard(name).get_slice(name).get_shape())

    def dtype(self, name: str) -> str:
        """safetensors' name of the element type: U8, I8, F32, BF16. Raises CheckpointError: no such tensor."""
        return str(self._shard(name).get_slice(name).get_dtype())

    def get(self, name: str) -> np.ndarray:
        """A whole tensor; floating-point ones as float32.

        Raises:
            CheckpointError: no such tensor; names it.
        """
        with self._mapped(name) as shard:
            tensor = shard.get_tensor(name)
        return (tensor.float() if tensor.is_floating_point() else tensor).numpy()

    def rows(self, name: str, start: int, stop: int) -> np.ndarray:
        """Rows [start, stop) of a floating-point tensor as float32, without reading the others.

        Raises:
            CheckpointError: no such tensor; names it.
        """
        with self._mapped(name) as shard:
            return shard.get_slice(name)[start:stop].float().numpy().copy()

    def _mapped(self, name: str) -> safe_open:
        """The shard as torch reads it, mapped anew: what a long-lived map has read stays in the process's memory."""
        self._shard(name)
        return safe_open(self.folder / self._owner[name], framework="pt")

    def _shard(self, name: str) -> safe_open:
        if name not in self._owner:
            raise CheckpointError(f"checkpoint {self.folder} has no tensor {name}", FETCH_HINT)
        return self._shards[self._owner[name]]


def _file_names(folder: Path) -> list[str]:
    index = folder / INDEX_NAME
    if not index.is_file():
        return [SINGLE_NAME]
    try:
        return list(msgspec.json.decode(index.read_bytes())["weight_map"].values())
    except (msgspec.DecodeError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index} is not a safetensors index", FETCH_HINT) from error


def _opened(path: Path) -> safe_open:
    try:
        return safe_open(path, framework="numpy")
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} does not exist", FETCH_HINT) from error
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is cut short or damaged: {error}", FETCH_HINT) from error
