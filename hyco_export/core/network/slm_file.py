"""The static SLM on disk: one safetensors file with its shape, packed integers, scales and norms.

`<linear>.integers` packed as in the checkpoint (`core.packing`), `<linear>.scales` float32 [N], `<norm>` float32 [n];
metadata `shape` (JSON of `SlmShape`). The output layer has the kept rows only. The float back end is rebuilt from it;
the graphs hold the same integers.
"""

from pathlib import Path

import msgspec
import numpy as np
from safetensors import SafetensorError, safe_open

from hyco_export.core.network.slm import SlmNetwork
from hyco_export.core.network.weights import MatrixShape, PackedMatrices, PackedMatrix, Weights
from hyco_export.core.tensor_writer import Declared, TensorWriter
from hyco_export.errors import ArtifactError

WEIGHTS_FILE = "slm_weights.safetensors"
INTEGERS, SCALES = ".integers", ".scales"
SHAPE_KEY = "shape"  # one key: safetensors writes several in no fixed order, and equal inputs must give equal bytes


class LinearLayout(msgspec.Struct, frozen=True):
    """How a linear layer's integers are packed."""

    bits: int
    width: int


class SlmShape(msgspec.Struct, frozen=True):
    """What the tensors alone do not say."""

    network: SlmNetwork
    linears: dict[str, LinearLayout]


def write_slm(path: Path, network: SlmNetwork, weights: Weights) -> None:
    """Write the file, one linear layer after the other; `weights.matrices` must be `PackedMatrices`."""
    matrices = weights.matrices
    assert isinstance(matrices, PackedMatrices)
    layouts = {name: LinearLayout(shape.bits, shape.width) for name, shape in matrices.shapes.items()}
    declared = {name: Declared("float32", vector.shape) for name, vector in weights.vectors.items()}
    for name, shape in matrices.shapes.items():
        declared[name + INTEGERS] = Declared(*shape.stored)
        declared[name + SCALES] = Declared("float32", (shape.rows,))
    described = msgspec.json.encode(SlmShape(network, layouts)).decode()
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
            shape = msgspec.json.decode((file.metadata() or {})[SHAPE_KEY], type=SlmShape)
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
        shape = msgspec.json.decode((file.metadata() or {})[SHAPE_KEY], type=SlmShape)
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
