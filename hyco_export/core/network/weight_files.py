"""Quantised head and static SLM on disk: one safetensors file each, with integers, scales, norms and the network.

`<layer>.integers` int8 [N, K] (4-bit values one per byte) and `<layer>.scales` float32 [N] for every linear layer,
`<layer>.multipliers` uint8 [N, J] where it has blocks of inputs, `<norm>` float32 [n] for every norm; metadata `head`:
JSON of `HeadDescription`. The output layer still has all rows of the vocabulary. The SLM's file has packed integers,
metadata `shape`: JSON of `SlmDescription`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from hyco_export.core.files import Declared, TensorWriter
from hyco_export.core.network.head import FINAL_NORM, OUTPUT_LAYER, TABLE, HeadArchitecture
from hyco_export.core.network.slm import SlmNetwork
from hyco_export.core.network.weights import (
    IntegerMatrix,
    IntegerTable,
    MatrixShape,
    PackedMatrices,
    PackedMatrix,
    Weights,
)
from hyco_export.errors import ArtifactError

HEAD_FILE = "head.safetensors"
INTEGERS, SCALES, MULTIPLIERS = ".integers", ".scales", ".multipliers"
WEIGHTS_FILE = "slm_weights.safetensors"
# metadata keys, one a file: safetensors writes several in no fixed order, and equal weights must be equal files
METADATA = "head"
SHAPE_KEY = "shape"


class HeadDescription(msgspec.Struct, frozen=True, omit_defaults=True):
    """Metadata of a head's file. `overrides`: width of the layers whose integers do not have `bits`."""

    bits: int
    architecture: HeadArchitecture
    overrides: dict[str, int] = {}


@dataclass(frozen=True)
class StoredHead:
    """Linear layers and norms by the names that `core.network.head` uses."""

    architecture: HeadArchitecture
    bits: int
    matrices: Mapping[str, IntegerMatrix]
    vectors: Mapping[str, np.ndarray]

    def device_weights(self, kept: np.ndarray, table: IntegerTable, final_norm: np.ndarray | None) -> Weights:
        """What the graph reads: the output layer has the rows of the token ids `kept` [C] only.

        `final_norm` [H] is the verifier's, for a head that is handed h from before it.
        """
        restricted = self.matrices[OUTPUT_LAYER].rows(kept)
        vectors = dict(self.vectors) if final_norm is None else {**self.vectors, FINAL_NORM: final_norm}
        return Weights({**self.matrices, OUTPUT_LAYER: restricted}, vectors, {TABLE: table})


def write_head(path: Path, head: StoredHead) -> None:
    """Write a head's file."""
    tensors: dict[str, np.ndarray] = dict(head.vectors)
    for name, matrix in head.matrices.items():
        tensors[name + INTEGERS] = matrix.integers
        tensors[name + SCALES] = matrix.scales
        if matrix.multipliers is not None:
            tensors[name + MULTIPLIERS] = matrix.multipliers
    overrides = {name: matrix.bits for name, matrix in sorted(head.matrices.items()) if matrix.bits != head.bits}
    metadata = {METADATA: msgspec.json.encode(HeadDescription(head.bits, head.architecture, overrides)).decode()}
    save_file({name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}, path, metadata=metadata)


def read_head(folder: Path) -> StoredHead:
    """The head of a `qat-head` artifact.

    Raises:
        ArtifactError: the file is missing, cut or not a quantised head.
    """
    path = folder / HEAD_FILE
    try:
        with safe_open(path, framework="numpy") as stored:
            description = msgspec.json.decode(stored.metadata()[METADATA], type=HeadDescription)
            tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118  # a handle, not a dict
        linears = [name.removesuffix(INTEGERS) for name in tensors if name.endswith(INTEGERS)]
        matrices = {
            name: IntegerMatrix(
                tensors.pop(name + INTEGERS),
                tensors.pop(name + SCALES),
                description.overrides.get(name, description.bits),
                tensors.pop(name + MULTIPLIERS, None),
            )
            for name in linears
        }
        return StoredHead(description.architecture, description.bits, matrices, tensors)
    except (OSError, SafetensorError, KeyError, TypeError, ValueError, msgspec.DecodeError) as error:
        raise ArtifactError(
            f"{path} is not a quantised head: {error}", "build it again: hyco-export qat-head"
        ) from error


class LinearLayout(msgspec.Struct, frozen=True):
    """How a linear layer's integers are packed."""

    bits: int
    width: int


class SlmDescription(msgspec.Struct, frozen=True):
    """Metadata of an SLM's file."""

    network: SlmNetwork
    linears: dict[str, LinearLayout]


def write_slm(path: Path, network: SlmNetwork, weights: Weights) -> None:
    """Write an SLM's file, one linear layer after the other; `weights.matrices` must be `PackedMatrices`."""
    matrices = weights.matrices
    assert isinstance(matrices, PackedMatrices)
    layouts = {name: LinearLayout(shape.bits, shape.width) for name, shape in matrices.shapes.items()}
    declared = {name: Declared("float32", vector.shape) for name, vector in weights.vectors.items()}
    for name, shape in matrices.shapes.items():
        declared[name + INTEGERS] = Declared(*shape.stored)
        declared[name + SCALES] = Declared("float32", (shape.rows,))
    described = msgspec.json.encode(SlmDescription(network, layouts)).decode()
    with TensorWriter(path, declared, {SHAPE_KEY: described}) as writer:
        for name, vector in weights.vectors.items():
            writer.put(name, vector)
        for name in matrices:
            matrix = matrices.packed(name)
            writer.put(name + INTEGERS, matrix.integers)
            writer.put(name + SCALES, matrix.scales)


def linears_of_width(path: Path, bits: int) -> tuple[str, ...]:
    """Names of the linear layers whose integers have `bits` bits; reads no weights.

    Raises:
        ArtifactError: missing, damaged or written by another version.
    """
    try:
        with safe_open(path, framework="numpy") as file:
            shape = msgspec.json.decode((file.metadata() or {})[SHAPE_KEY], type=SlmDescription)
    except (OSError, SafetensorError, KeyError, msgspec.MsgspecError) as error:
        raise ArtifactError(
            f"SLM weights {path} cannot be read: {error}", "build it again: hyco-export convert-slm"
        ) from error
    return tuple(sorted(name for name, layout in shape.linears.items() if layout.bits == bits))


def read_slm(path: Path) -> tuple[SlmNetwork, Weights]:
    """The network and its weights; the linear layers stay in the file and are read at every use.

    Raises:
        ArtifactError: missing, damaged or written by another version.
    """
    hint = "build it again: hyco-export convert-slm"
    try:
        file = safe_open(path, framework="numpy")
        shape = msgspec.json.decode((file.metadata() or {})[SHAPE_KEY], type=SlmDescription)
        shapes = {
            name: MatrixShape(file.get_slice(name + INTEGERS).get_shape()[0], layout.width, layout.bits)
            for name, layout in shape.linears.items()
        }
        linears = {name + part for name in shapes for part in (INTEGERS, SCALES)}
        vectors = {name: file.get_tensor(name) for name in file.keys() if name not in linears}  # noqa: SIM118 - a handle
    except (OSError, SafetensorError, KeyError, msgspec.MsgspecError) as error:
        raise ArtifactError(f"SLM weights {path} cannot be read: {error}", hint) from error

    def read(name: str) -> PackedMatrix:
        integers: np.ndarray = file.get_tensor(name + INTEGERS)
        return PackedMatrix(integers, file.get_tensor(name + SCALES), shapes[name].bits, shapes[name].width)

    return shape.network, Weights(PackedMatrices(shapes, read), vectors, {})
