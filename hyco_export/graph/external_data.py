"""The large weights of one or more ONNX graphs in a file beside them, written while the graphs are built.

A protobuf of a gigabyte would be copied several times on its way to the disk. Graphs that use the same weights share
the file: a weight is stored once, under its name. Knows initializers and places in the file; no graph.
"""

import os
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
from onnx import TensorProto
from onnx.external_data_helper import ExternalDataInfo, set_external_data, uses_external_data

PAGE_BYTES = 4096  # ONNX Runtime maps a tensor that starts on a page
INLINE_BYTES = 64 * 1024  # smaller tensors stay in the graph: scales, zero points, norms


class ExternalData:
    """A data file under construction; a context manager.

    Args:
        path: the file; graphs that refer to it must lie in the same folder.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stored: dict[str, list[TensorProto]] = {}
        self._file = path.open("wb")

    def place(self, name: str, make: Callable[[], list[TensorProto]]) -> list[TensorProto]:
        """The initializers of the linear layer `name`, their large values moved to the file.

        Args:
            make: the initializers with their values; called for the first graph that uses the layer only.
        """
        if name not in self._stored:
            self._stored[name] = [self._moved(tensor) for tensor in make()]
        return self._stored[name]

    def _moved(self, tensor: TensorProto) -> TensorProto:
        if len(tensor.raw_data) <= INLINE_BYTES:
            return tensor
        offset = -(-self._file.tell() // PAGE_BYTES) * PAGE_BYTES
        self._file.seek(offset)
        self._file.write(tensor.raw_data)
        set_external_data(tensor, self._path.name, offset, len(tensor.raw_data))
        tensor.ClearField("raw_data")
        return tensor

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()


def raw_bytes(tensor: TensorProto, folder: Path | None) -> np.ndarray:
    """uint8 [n]: an initializer's values, from its own bytes or mapped from the file in `folder` that holds them."""
    if not uses_external_data(tensor):
        return np.frombuffer(tensor.raw_data, np.uint8)
    place = ExternalDataInfo(tensor)
    assert place.length is not None, tensor.name  # `ExternalData` always says it
    return np.memmap((folder or Path()) / place.location, np.uint8, "r", int(place.offset or 0), (int(place.length),))
