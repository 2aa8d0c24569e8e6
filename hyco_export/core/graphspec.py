"""What a static graph takes and gives: names, shapes, integer dtypes and encodings of its inputs and outputs.

The device host code feeds and reads graphs through this alone, so the float network, the QDQ graph on CPU and the
context binary on the NPU are interchangeable behind one `GraphSession`.
"""

from collections.abc import Mapping
from typing import Protocol

import msgspec
import numpy as np

from hyco_export.core.encodings import Encoding


class TensorSpec(msgspec.Struct, frozen=True):
    """One input or output. `encoding` is None for plain integers (token rows, ids)."""

    name: str
    shape: tuple[int, ...]
    dtype: str  # numpy name: uint8, uint16, int32
    encoding: Encoding | None = None


class GraphSpec(msgspec.Struct, frozen=True):
    """Inputs and outputs of one graph, in graph order."""

    name: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]

    def input(self, name: str) -> TensorSpec:
        return next(spec for spec in self.inputs if spec.name == name)

    def output(self, name: str) -> TensorSpec:
        return next(spec for spec in self.outputs if spec.name == name)


class GraphSession(Protocol):
    """Something that runs one graph: integers in, integers out, by name."""

    def run(self, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]: ...

    def close(self) -> None: ...
